// npm: @bufbuild/buf
// buf curl over gRPC, by the router's reflection. Prints an answer a line.

import { execFileSync } from "node:child_process";

const [, , , model, address] = process.argv;
const call = (method, message) =>
  execFileSync(
    "node_modules/.bin/buf",
    [
      ...["curl", "--protocol", "grpc", "--http2-prior-knowledge"],
      ...["--data", JSON.stringify(message), `http://${address}/${method}`],
    ],
    { encoding: "utf8" },
  );
// Messages of a stream are printed one after the other.
const messages = (printed) => JSON.parse(`[${printed.replaceAll(/^}\n{/gm, "},{")}]`);

const chat = { messages: [{ role: "user", content: "What is the capital of France?" }] };
const stream = messages(call("baton.v1.Inference/Generate", { model, chat }));
console.log(stream.map((message) => message.delta?.text ?? "").join(""));

const prompt = messages(call("baton.v1.Inference/Tokenize", { chat }))[0];
const tensor = (name, datatype, contents) => ({ name, datatype, shape: [1], contents });
const encoded = Buffer.from(prompt.rendered).toString("base64");
const [answer] = messages(
  call("inference.GRPCInferenceService/ModelInfer", {
    modelName: model,
    inputs: [
      tensor("text_input", "BYTES", { bytesContents: [encoded] }),
      tensor("exclude_input_in_output", "BOOL", { boolContents: [true] }),
    ],
    parameters: { max_tokens: { int64Param: 30 } },
  }),
);
const [text] = answer.outputs.filter((output) => output.name === "text_output");
console.log(Buffer.from(text.contents.bytesContents[0], "base64").toString());
