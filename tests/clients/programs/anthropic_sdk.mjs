// npm: @anthropic-ai/sdk
// Anthropic's SDK of Node.js. Prints an answer a line.
import Anthropic from "@anthropic-ai/sdk";

const [address, model] = process.argv.slice(2);
const client = new Anthropic({ baseURL: address, apiKey: "none" });
const messages = [{ role: "user", content: "What is the capital of France?" }];
const asked = { model, messages, max_tokens: 40, temperature: 0 };
const message = await client.messages.create(asked);
console.log(message.content[0].text);
const streamed = await client.messages.stream(asked).finalMessage();
console.log(streamed.content[0].text);
// It first asks the server to keep the conversation.
let city;
const capital = {
  name: "capital",
  description: "Tells a capital",
  input_schema: {
    type: "object",
    properties: { city: { enum: ["Paris"] } },
    required: ["city"],
    additionalProperties: false,
  },
  parse: (input) => input,
  run: (input) => (city = input.city),
};
const options = { tools: [capital], tool_choice: { type: "any" }, max_iterations: 2 };
await client.beta.messages.toolRunner({ ...asked, ...options });
console.log(`The capital of France is ${city}.`);
