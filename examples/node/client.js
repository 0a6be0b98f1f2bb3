// Streams an answer over gRPC.
//
//   npm install && node client.js [HOST:PORT]

const path = require("node:path");
const grpc = require("@grpc/grpc-js");
const protoLoader = require("@grpc/proto-loader");

const address = process.argv[2] ?? "127.0.0.1:50051";
const definition = protoLoader.loadSync("baton/v1/inference.proto", {
  includeDirs: [path.join(__dirname, "..", "..", "proto")],
  enums: String,
  defaults: true,
  oneofs: true,
});
const { Inference } = grpc.loadPackageDefinition(definition).baton.v1;

const client = new Inference(address, grpc.credentials.createInsecure());
const messages = [{ role: "user", content: "What is the capital of France?" }];
// A deadline holds for the whole answer; call.cancel() stops the work earlier.
const call = client.generate({ chat: { messages }, maxTokens: 64 }, { deadline: Date.now() + 60_000 });

call.on("data", (response) => {
  if (response.delta) process.stdout.write(response.delta.text);
  if (response.finished) console.log(`\n${response.finished.finishReason}`);
});
call.on("error", (error) => {
  console.error(`${grpc.status[error.code]}: ${error.details}`);
  process.exitCode = 1;
});
call.on("end", () => client.close());
