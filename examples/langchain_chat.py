"""LangChain with Baton as its chat model: one answer, a stream and a chain.

pip install langchain-openai
python examples/langchain_chat.py [http://HOST:PORT]
"""

import sys

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
model = ChatOpenAI(
    base_url=f"{url}/v1", api_key="none", model="SmolLM2-135M-Instruct", temperature=0
)

print(model.invoke("What is the capital of France?").content)

for chunk in model.stream("Name three colors.", max_tokens=32):
    print(chunk.content, end="", flush=True)
print()

prompt = ChatPromptTemplate.from_messages([("user", "What is the capital of {country}?")])
chain = prompt | model | StrOutputParser()
print(chain.invoke({"country": "France"}))
