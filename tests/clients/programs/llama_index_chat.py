# pip: llama-index-llms-openai-like llama-index-embeddings-openai-like
"""LlamaIndex: chats, streams, completions, a tool's structure and a vector. Prints an answer a
line."""

import sys

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field


class Capital(BaseModel):
    city: str = Field(pattern="^Paris$")


address, model = sys.argv[1:3]
question = "What is the capital of France?"
server = {"api_base": f"{address}/v1", "api_key": "none"}
llm = OpenAILike(
    model=model,
    is_chat_model=True,
    is_function_calling_model=True,
    temperature=0,
    max_tokens=40,
    **server,
)
asked = [ChatMessage(role="user", content=question)]
print(llm.chat(asked).message.content)
print("".join(part.delta or "" for part in llm.stream_chat(asked)))
print(llm.complete(question).text)
capital = llm.structured_predict(Capital, PromptTemplate(question))
print(f"The capital of France is {capital.city}.")
plain = OpenAILike(model=model, is_chat_model=False, temperature=0, max_tokens=3, **server)
start = "The capital of France is"
print(f"{start}{plain.complete(start).text.partition('.')[0]}.")
assert len(OpenAILikeEmbedding(model_name=model, **server).get_text_embedding(question)) > 64
