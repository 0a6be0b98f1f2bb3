# pip: pydantic-ai-slim[openai]
"""pydantic-ai over chats and responses. Prints an answer a line."""

import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

address, name = sys.argv[1:3]
provider = OpenAIProvider(base_url=f"{address}/v1", api_key="none")
for kind in (OpenAIChatModel, OpenAIResponsesModel):
    settings = {"temperature": 0, "max_tokens": 40}
    agent = Agent(kind(name, provider=provider), model_settings=settings)
    print(agent.run_sync("What is the capital of France?").output)
