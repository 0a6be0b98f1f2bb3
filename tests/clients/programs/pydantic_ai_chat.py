# pip: pydantic-ai-slim[openai,anthropic]
"""pydantic-ai over chats, responses and messages. Prints an answer a line."""

import sys

from anthropic import AsyncAnthropic
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

address, name = sys.argv[1:]
provider = OpenAIProvider(base_url=f"{address}/v1", api_key="none")
theirs = AnthropicProvider(anthropic_client=AsyncAnthropic(base_url=address, api_key="none"))
for model in (
    OpenAIChatModel(name, provider=provider),
    OpenAIResponsesModel(name, provider=provider),
    AnthropicModel(name, provider=theirs),
):
    settings = {"temperature": 0, "max_tokens": 40}
    agent = Agent(model, model_settings=settings)
    print(agent.run_sync("What is the capital of France?").output)
