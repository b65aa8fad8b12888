"""The shapes of OpenAI's API, as far as this server speaks it, and MARS's own fields in them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from mars_lm.settings import RULES, Rule

MAX_CHOICES = 16
MAX_STOPS = 16
MAX_STOP_LENGTH = 256
MAX_MESSAGES = 1024
MAX_PROMPTS = 64
# Tags of unions below; they are no part of a field's name in an error.
UNION_TAGS = frozenset({"text", "parts", "texts", "ids", "id_lists"})

# What OpenAI's API has and this server has not. The values listed ask for nothing, and are let through.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "parallel_tool_calls": (None, True, False),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "reasoning_effort": (None, "none"),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
    "logit_bias": (None, {}),
    "store": (None, False),
    "suffix": (None, ""),
    "echo": (None, False),
    "tool_calls": (None, []),
    "refusal": (None,),
    "annotations": (None, []),
}
# Bookkeeping for OpenAI's own servers, which changes no answer.
_IGNORED = (
    "user",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "service_tier",
)


TokenId = Annotated[int, Field(ge=0, lt=2**31)]


def _whole(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON can spell half of a surrogate pair, which is no character
        raise PydanticCustomError("not_unicode", "Expected Unicode text, not half a character") from None
    return text


Text = Annotated[str, AfterValidator(_whole)]


def _unsupported(what: str, *, field: str | None = None) -> PydanticCustomError:
    """`field` names the one at fault in the object being read; without it, the whole object is meant."""
    return PydanticCustomError(
        "unsupported", "{what} is not supported by this server", {"what": what, "field": field}
    )


class _Request(BaseModel):
    # Strict: a number in quotes is a mistake worth telling, not one to guess at.
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_what_we_lack(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        for name in sorted(value.keys() & _NEUTRAL.keys() - cls.model_fields.keys()):
            if not any(value[name] is neutral or value[name] == neutral for neutral in _NEUTRAL[name]):
                raise _unsupported(f"'{name}'", field=name)
        return {
            name: given
            for name, given in value.items()
            if name in cls.model_fields or (name not in _NEUTRAL and name not in _IGNORED)
        }


class MarsRequest(BaseModel):
    """What a request chooses for itself; the rest follows the server's live defaults."""

    model_config = ConfigDict(extra="forbid", strict=True)

    tau: Annotated[float, Field(ge=0)] | None = Field(None, description="What a drafted token needs.")
    rule: Rule | None = Field(None, description=f"What tau limits: {', '.join(RULES)}.")
    block_size: Annotated[int, Field(ge=1)] | None = Field(None, description="Most tokens of one forward.")
    exact: bool | None = Field(None, description="Whether drafts are verified against one-token decoding.")
    adaptive: bool | None = Field(None, description="No more masks than pay, or always all.")

    def chosen(self) -> dict[str, Any]:
        """The fields that are named."""
        return self.model_dump(exclude_none=True)


class TextPart(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]
    text: Text

    @model_validator(mode="before")
    @classmethod
    def _text_only(cls, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(value.get("type"), str) and value["type"] != "text":
            raise _unsupported(f"Content of type '{value['type'][:40]}'")
        return value


def _kind_of_content(value: Any) -> str | None:
    return "text" if isinstance(value, str) else "parts" if isinstance(value, list) else None


Content = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_MESSAGES), Tag("parts")],
    Discriminator(
        _kind_of_content,
        custom_error_type="content_type",
        custom_error_message="Expected a text, or a list of parts of type 'text'",
    ),
]


class Message(_Request):
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _no_tools(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("role") in ("tool", "function"):
            raise _unsupported(f"A message of role '{value['role']}'")
        return value

    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


StopText = Annotated[Text, Field(min_length=1, max_length=MAX_STOP_LENGTH)]


def _kind_of_texts(value: Any) -> str | None:
    return "text" if isinstance(value, str) else "texts" if isinstance(value, list) else None


Stop = Annotated[
    Annotated[StopText, Tag("text")] | Annotated[list[StopText], Field(max_length=MAX_STOPS), Tag("texts")],
    Discriminator(
        _kind_of_texts,
        custom_error_type="stop_type",
        custom_error_message="Expected a text, or a list of texts",
    ),
]


class Sampling(_Request):
    """What chat and plain completions share."""

    model: str
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy; without it: the server's.")
    top_p: float | None = Field(None, ge=0, le=1)
    max_tokens: int | None = Field(None, ge=1)
    stop: Stop | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    mars: MarsRequest | None = Field(None, description="MARS's own settings of this request.")
    # As vLLM has them, for clients that send them.
    top_k: int | None = Field(None, ge=-1, lt=2**31, description="0 and -1: no limit.")
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=1e-3, le=1e3)
    min_tokens: int | None = Field(None, ge=0)
    stop_token_ids: list[TokenId] | None = Field(None, max_length=MAX_STOPS)
    ignore_eos: bool | None = None

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> Sampling:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "'stream_options' needs 'stream' to be true")
        return self


class ChatRequest(Sampling):
    """`POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "'top_logprobs' needs 'logprobs' to be true")
        if None not in (self.max_tokens, self.max_completion_tokens) and (
            self.max_tokens != self.max_completion_tokens
        ):
            raise PydanticCustomError(
                "max_tokens", "'max_tokens' and 'max_completion_tokens' differ: give one of the two"
            )
        return self


def _kind_of_prompt(value: Any) -> str | None:
    if isinstance(value, str):
        return "text"
    if not isinstance(value, list) or not value:
        return None
    first = value[0]
    return "texts" if isinstance(first, str) else "id_lists" if isinstance(first, list) else "ids"


TokenIds = Annotated[list[TokenId], Field(min_length=1)]
Prompt = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS), Tag("texts")]
    | Annotated[TokenIds, Tag("ids")]
    | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS), Tag("id_lists")],
    Discriminator(
        _kind_of_prompt,
        custom_error_type="prompt_type",
        custom_error_message="Expected a text, a list of texts, a list of token ids, or a list of such lists",
    ),
]


class CompletionRequest(Sampling):
    """`POST /v1/completions`."""

    prompt: Prompt
    logprobs: int | None = Field(None, ge=0, le=20)
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)

    @model_validator(mode="after")
    def _no_selection(self) -> CompletionRequest:
        if self.best_of not in (None, self.n or 1):
            raise _unsupported("'best_of' other than 'n'", field="best_of")
        return self

    def prompts(self) -> list[str] | list[list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return cast(list[list[int]], [self.prompt])
        return self.prompt


class SettingsChange(BaseModel):
    """`PATCH /mars/settings`: the fields to change."""

    model_config = ConfigDict(extra="forbid", strict=True)

    tau: Annotated[float, Field(ge=0)] | None = None
    rule: Rule | None = None
    block_size: Annotated[int, Field(ge=1)] | None = None
    exact: bool | None = None
    adaptive: bool | None = None
    controller: bool | None = Field(None, description="Let the load turn tau; naming tau turns it off.")


# Answers. They are written by hand (answers.py), and described here for clients and for tests.


class Settings(BaseModel):
    """`GET /mars/settings`."""

    tau: float
    rule: Rule
    block_size: int | None
    exact: bool
    adaptive: bool
    trained_block_size: int | None
    controller: bool | None
    tau_range: list[float] | None
    target_queue: int | None


class MarsNumbers(BaseModel):
    """How an answer came about: forwards of the model, and what each of them yielded."""

    forwards: int
    tokens_per_forward: float
    accepted_lengths: list[int]
    rejected_drafts: int


class MarsChunk(BaseModel):
    """What one forward yielded."""

    tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob] | None
    refusal: None


class ChatAnswerMessage(BaseModel):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(BaseModel):
    index: int
    message: ChatAnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]
    mars: MarsNumbers


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    mars: MarsNumbers


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    mars: MarsNumbers


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage
    mars: MarsNumbers


class Model(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    mars: dict[str, Any] | None


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[Model]


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    error: ErrorDetail


class Health(BaseModel):
    status: str
