// npm: ai @ai-sdk/openai @ai-sdk/openai-compatible
// Vercel's AI SDK: responses, which are its default, and chats, each with a second turn that refers
// to the first. Prints an answer a line.
import assert from "node:assert";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";

const [address, name] = process.argv.slice(2);
const baseURL = `${address}/v1`;
const openai = createOpenAI({ baseURL, apiKey: "none" });
const compatible = createOpenAICompatible({ name: "baton", baseURL });
const prompt = "What is the capital of France?";
for (const model of [openai(name), openai.chat(name), compatible(name)]) {
  const { text, response } = await generateText({ model, prompt, temperature: 0 });
  console.log(text);
  const asked = { role: "user", content: prompt };
  const messages = [asked, ...response.messages, asked];
  const again = await generateText({ model, messages, temperature: 0, maxOutputTokens: 40 });
  assert(again.text.length > 0);
  console.log(await streamText({ model, prompt, temperature: 0 }).text);
}
