// npm: ai @ai-sdk/openai @ai-sdk/openai-compatible
// Vercel's AI SDK: responses, which are its default, and chats. Prints an answer a line.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";

const [address, name] = process.argv.slice(2);
const baseURL = `${address}/v1`;
const openai = createOpenAI({ baseURL, apiKey: "none" });
const compatible = createOpenAICompatible({ name: "baton", baseURL });
const prompt = "What is the capital of France?";
for (const model of [openai(name), openai.chat(name), compatible(name)]) {
  console.log((await generateText({ model, prompt, temperature: 0 })).text);
  console.log(await streamText({ model, prompt, temperature: 0 }).text);
}
