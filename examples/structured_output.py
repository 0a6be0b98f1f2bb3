"""An answer that follows a Pydantic model, token by token (OpenAI's SDK).

pip install openai
python examples/structured_output.py [http://HOST:PORT]
"""

import sys
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel, Field

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"


class City(BaseModel):
    name: str = Field(max_length=20)
    country: Literal["France", "Italy", "Spain"]
    inhabitants: int = Field(ge=0, le=99_999_999)


with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
    answer = client.chat.completions.parse(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": "Describe Paris as JSON."}],
        response_format=City,
        temperature=0,
    )
    city = answer.choices[0].message.parsed
    print(repr(city))
