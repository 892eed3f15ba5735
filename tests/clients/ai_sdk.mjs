// A question, a tool, an answer, another question: by the AI SDK of Vercel.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, tool } from "ai";
import { z } from "zod";

const served = createOpenAICompatible({
  name: "keepwarm",
  baseURL: process.env.OPENAI_BASE_URL,
  apiKey: process.env.OPENAI_API_KEY,
});
const tools = {
  count_leaves: tool({
    description: "Say how many leaves a tree has.",
    inputSchema: z.object({ tree: z.string() }),
    execute: async ({ tree }) => `The ${tree} has four leaves.`,
  }),
};
const messages = [];
for (const question of ["How many leaves has the oak?", "And in winter?"]) {
  messages.push({ role: "user", content: question });
  const stopWhen = stepCountIs(4);
  const answer = await generateText({ model: served("any"), messages, tools, stopWhen });
  messages.push(...answer.responseMessages);
  console.log(answer.text);
}
