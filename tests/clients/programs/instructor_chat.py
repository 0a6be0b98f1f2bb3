# pip: instructor
"""instructor with tools and with JSON. Prints an answer a line."""

import sys

import instructor
import openai
from pydantic import BaseModel, Field


class Capital(BaseModel):
    city: str = Field(pattern="^Paris$")


address, model = sys.argv[1:3]
asked = [{"role": "user", "content": "What is the capital of France?"}]
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(
        openai.OpenAI(base_url=f"{address}/v1", api_key="none"), mode=mode
    )
    capital = client.chat.completions.create(
        model=model, messages=asked, response_model=Capital, temperature=0
    )
    print(f"The capital of France is {capital.city}.")
