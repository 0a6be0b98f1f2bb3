"""A visit of the page: what a person does there, and all that goes wrong meanwhile."""

from __future__ import annotations

import json
import re

from playwright.sync_api import ConsoleMessage, Locator, Page, Request, Route, expect

WIDE = {"width": 1400, "height": 1000}
PHONE = {"width": 390, "height": 844}
ANSWER_MILLISECONDS = 90_000


class Visit:
    def __init__(self, page: Page, address: str) -> None:
        self.page = page
        self.problems: list[str] = []
        self.elsewhere: list[str] = []
        self.asked: list[dict[str, object]] = []
        self._address = address
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("console", self._note)
        page.on("request", self._request)
        page.goto(address)

    @property
    def question(self) -> Locator:
        return self.page.get_by_label("Your message")

    @property
    def answer(self) -> Locator:
        """The last one."""
        return self.page.locator(".message.assistant").last

    @property
    def texts(self) -> list[str]:
        return self.page.locator(".message .text").all_inner_texts()

    def set(self, name: str, value: str) -> None:
        """One of the settings."""
        drawer = self.page.locator("#settings")
        if drawer.get_attribute("open") is None:
            drawer.locator("summary").click()
        drawer.get_by_label(name).fill(value)

    def ask(self, question: str) -> None:
        self.question.fill(question)
        self.page.get_by_role("button", name="Send").click()
        self.wait_answered()

    def wait_answered(self) -> None:
        expect(self.answer).not_to_have_class(re.compile("writing"), timeout=ANSWER_MILLISECONDS)

    def dictate(self, answer: str) -> None:
        """Makes the model answer with this text: guides the request on its way to the router."""

        def guide(route: Route) -> None:
            body = {**route.request.post_data_json, "guided_choice": [answer], "max_tokens": 2000}
            route.continue_(post_data=json.dumps(body))

        self.page.route("**/v1/chat/completions", guide)

    def _note(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self.problems.append(message.text)

    def _request(self, request: Request) -> None:
        if not request.url.startswith(self._address):
            self.elsewhere.append(request.url)
        elif request.url.endswith("/chat/completions"):
            self.asked.append(request.post_data_json)
