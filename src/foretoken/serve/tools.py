"""Tools of a conversation: what its template is shown, and what a grammar makes of an answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foretoken.errors import RequestError
from foretoken.sampling.schemas import as_text
from foretoken.sampling.structured import ANY_OBJECT, FIELD
from foretoken.serve.parsers.formats import FORMATS, MessageFormat
from foretoken.serve.protocol.chat import ChatBody, NamedTool


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request says of tools.

    Attributes:
        shown: to the template; None: none.
        names: of the functions whose calls are looked for; () where none may be called.
        forced: those of them of which one must be called; () where the model decides.
        parallel: whether there may be several.
    """

    shown: Sequence[Mapping[str, Any]] | None = None
    names: tuple[str, ...] = ()
    forced: Sequence[Mapping[str, Any]] = ()
    parallel: bool = True

    def grammar(self, form: MessageFormat, asked: Any) -> str | None:
        """What an answer must be, in Lark: calls that are forced, or else calls or a text.

        Args:
            asked: `SamplingParams.structured_outputs`: what a text must be; None: anything, so that
                only calls that are forced need a grammar.

        Raises:
            RequestError: a text must be other than JSON.
        """
        if form.calls is None or not (self.forced or (self.names and asked)):
            return None
        answer = None
        if not self.forced and asked is not None:
            [(kind, value)] = asked.items()
            answer = {"json": value, "json_object": as_text(kind, ANY_OBJECT)}.get(kind)
            if answer is None:
                bound = "a JSON schema: next to `tools` an answer is a call or JSON"
                raise RequestError(FIELD, {kind: value}, bound)
        tools = self.forced or self.shown or ()
        return form.grammar(form.calls, tools, parallel=self.parallel, answer=answer)


def read_tools(body: ChatBody, form: MessageFormat) -> ToolUse:
    """`tools`, `tool_choice` and `parallel_tool_calls`; with `none` the model sees no tools.

    Raises:
        RequestError: they do not fit each other, or the format of the model's calls is not known.
    """
    choice = body.tool_choice
    if not body.tools:
        for name in ("tool_choice", "parallel_tool_calls"):
            if (value := getattr(body, name)) is not None and value != "none":
                shown = value.model_dump() if isinstance(value, NamedTool) else value
                raise RequestError(name, shown, "left out without `tools`")
        return ToolUse()
    tools = [
        tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in body.tools
    ]
    names = tuple(tool.function.name for tool in body.tools)
    try:
        json.dumps(tools, allow_nan=False)
    except ValueError as error:
        raise RequestError("tools", names, f"JSON: {error}") from None
    if len({*names}) < len(names):
        raise RequestError("tools", names, "functions of different names")
    if choice == "none":
        return ToolUse()
    if form.calls is None:
        known, bound = ", ".join(FORMATS), "left out: how this model writes calls is not known"
        raise RequestError("tools", names, bound, f"See --tool-call-parser: {known}.")
    parallel = body.parallel_tool_calls is not False
    forced = tools if choice == "required" else []
    if isinstance(choice, NamedTool):
        name, parallel = choice.function.name, False
        forced = [tool for tool in tools if tool["function"]["name"] == name]
        if not forced:
            raise RequestError("tool_choice.function.name", name, f"one of {', '.join(names)}")
    return ToolUse(tools, names, forced, parallel)
