# pip: dspy
"""dspy: its language model over chats and responses, and a predictor. Prints an answer a line."""

import sys
from typing import Literal

import dspy


class Capital(dspy.Signature):
    """Name the capital of the country."""

    country: str = dspy.InputField()
    city: Literal["Paris"] = dspy.OutputField()


address, model = sys.argv[1:3]
options = {"api_base": f"{address}/v1", "api_key": "none", "temperature": 0, "cache": False}
for kind in ("chat", "responses"):
    (answer,) = dspy.LM(f"openai/{model}", model_type=kind, max_tokens=40, **options)(
        "What is the capital of France?"
    )
    print(answer if isinstance(answer, str) else answer["text"])
# dspy asks for a schema only of models that it knows to follow one.
city = {"type": "object", "properties": {"city": {"const": "Paris"}}, "required": ["city"]}
form = {"type": "json_schema", "json_schema": {"name": "capital", "schema": city}}
lm = dspy.LM(f"openai/{model}", max_tokens=40, response_format=form, **options)
dspy.configure(lm=lm, adapter=dspy.JSONAdapter())
capital = dspy.Predict(Capital)(country="France")
print(f"The capital of France is {capital.city}.")
