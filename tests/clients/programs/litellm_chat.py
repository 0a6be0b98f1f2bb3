# pip: litellm mcp
"""litellm: chats, responses and messages. Prints an answer a line."""

import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # asks nobody for prices
import litellm

litellm.suppress_debug_info = True
address, model = sys.argv[1:3]
asked = [{"role": "user", "content": "What is the capital of France?"}]
options = {"model": f"openai/{model}", "api_base": f"{address}/v1", "api_key": "none"}
print(litellm.completion(messages=asked, temperature=0, **options).choices[0].message.content)
chunks = litellm.completion(messages=asked, temperature=0, stream=True, **options)
print("".join(chunk.choices[0].delta.content or "" for chunk in chunks))
response = litellm.responses(input=asked, temperature=0, **options)
print(response.output[0].content[0].text)
message = litellm.completion(
    messages=asked,
    temperature=0,
    max_tokens=40,
    model=f"anthropic/{model}",
    api_base=address,
    api_key="none",
)
print(message.choices[0].message.content)
