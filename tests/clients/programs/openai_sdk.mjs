// npm: openai
// OpenAI's SDK of Node.js. Prints an answer a line.
import OpenAI from "openai";

const [address, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${address}/v1`, apiKey: "none" });
const asked = [{ role: "user", content: "What is the capital of France?" }];
const chat = await client.chat.completions.create({ model, messages: asked, temperature: 0 });
console.log(chat.choices[0].message.content);
const response = await client.responses.create({ model, input: asked, temperature: 0 });
console.log(response.output_text);
const stream = client.responses.stream({ model, input: asked, temperature: 0 });
console.log((await stream.finalResponse()).output_text);
