// An object beside a tool, by the AI SDK of Vercel, through the provider that is named.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, tool } from "ai";
import { z } from "zod";

const baseURL = process.env.OPENAI_BASE_URL;
const apiKey = process.env.OPENAI_API_KEY;
const models = {
  compatible: createOpenAICompatible({ name: "keepwarm", baseURL, apiKey, supportsStructuredOutputs: true })("any"),
  chat: createOpenAI({ baseURL, apiKey }).chat("any"),
  responses: createOpenAI({ baseURL, apiKey }).responses("any"),
  anthropic: createAnthropic({ baseURL, apiKey })("claude-sonnet-4-5"),
};
const tools = {
  count_leaves: tool({
    description: "Say how many leaves a tree has.",
    inputSchema: z.object({ tree: z.string() }),
    execute: async ({ tree }) => `The ${tree} has four leaves.`,
  }),
};
const answer = await generateText({
  model: models[process.argv[2]],
  prompt: "Is the oak deciduous? Count its leaves first.",
  tools,
  output: Output.object({ schema: z.object({ deciduous: z.boolean() }) }),
  stopWhen: stepCountIs(4),
});
console.log(JSON.stringify(answer.output));
