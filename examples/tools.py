"""The model calls a function of this program and answers with its result (OpenAI's SDK).

pip install openai
python examples/tools.py [http://HOST:PORT]
"""

import json
import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"


def get_weather(city: str, days: int) -> str:
    return f"{city}: sunny for {days} days"


tools = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Returns the weather forecast for a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "maxLength": 20},
                    "days": {"type": "integer", "minimum": 1, "maximum": 7},
                },
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    }
]
messages = [{"role": "user", "content": "What will the weather be like in Paris this week?"}]

with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
    model = client.models.list().data[0].id
    # "required" guarantees one call. With "auto" the model decides.
    asked = client.chat.completions.create(
        model=model, messages=messages, tools=tools, tool_choice="required", temperature=0
    )
    message = asked.choices[0].message
    messages.append(message)
    for call in message.tool_calls:
        print(f"{call.function.name}({call.function.arguments})")
        result = get_weather(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

    answer = client.chat.completions.create(
        model=model, messages=messages, tools=tools, temperature=0, max_tokens=64
    )
    print(answer.choices[0].message.content)
