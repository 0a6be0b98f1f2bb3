"""The OpenAI API of responses: /v1/responses, with those that are stored."""
