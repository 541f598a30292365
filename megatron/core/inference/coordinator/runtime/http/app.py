"""The OpenAI-compatible application: megatron-core's endpoints, and what they lack around them."""

import logging
import time
from collections.abc import Generator
from typing import Any

from megatron.core.inference.text_generation_server.dynamic_text_gen_server import endpoints
from quart import Quart, Request, Response, current_app, g, request
from quart.json.provider import DefaultJSONProvider
from quart.wrappers.request import Body
from werkzeug.exceptions import HTTPException, MethodNotAllowed, RequestEntityTooLarge

from megatron.core.inference.coordinator.runtime.http import errors, jsons
from megatron.core.inference.coordinator.runtime.http.errors import ApiError
from megatron.core.inference.coordinator.runtime.http.limits import HttpSettings
from megatron.core.inference.coordinator.runtime.http.planning import (
    NAMES,
    Desk,
    Planner,
    PromptTokenizer,
)
from megatron.core.inference.coordinator.runtime.http.recording import (
    RecordingClient,
    Work,
    finish,
)
from megatron.core.inference.coordinator.runtime.http.validation import Bounds, Plan

logger = logging.getLogger(__name__)

DEFAULT_MODEL_NAME = "megatron"

_LIMITS = HttpSettings()


def build_app(
    client: Any,
    tokenizer: Any,
    *,
    parsers: list[str] | None = None,
    verbose: bool = False,
    model_name: str = DEFAULT_MODEL_NAME,
    replica: int = 0,
    vocab_size: int | None = None,
    max_sequence_tokens: int | None = None,
    max_request_tokens: int = _LIMITS.max_request_tokens,
    max_body_bytes: int = _LIMITS.largest_body(),
    body_timeout: float = _LIMITS.body_timeout,
    may_control: bool = True,
    desk: Desk | None = None,
) -> Quart:
    """Builds the application of one front end.

    Args:
        client: A started inference client.
        tokenizer: A megatron-core tokenizer.
        parsers: Names of megatron-core's response parsers, applied in order.
        verbose: Log every request and reply.
        model_name: The one model that /v1/models lists and that answers name.
        replica: Which front end this is; sent along as header `x-frontend-replica`.
        vocab_size: Token ids in requests must be below it: others can crash an engine. None: the
            tokenizer's, if it has one. A model whose vocabulary is padded may answer with more.
        max_sequence_tokens: Longest sequence of the model, beyond which its engines refuse a
            prompt; None: unknown.
        max_request_tokens: Most tokens over all choices of a request.
        max_body_bytes: Larger bodies are refused with status 413.
        body_timeout: Seconds for a body to come, and for an answer to be taken.
        may_control: Whether the client may send control signals, such as the profiler's.
        desk: Where requests are planned, by the bounds above. None: in this process.
    """
    if desk is None:
        bounds = bounds_of(tokenizer, vocab_size, max_sequence_tokens, max_request_tokens)
        desk = Desk(Planner(tokenizer, bounds))
    app = Quart(__name__, static_folder=None)
    app.request_class = PlannedRequest
    app.json = AnswerJSON(app)
    app.url_map.merge_slashes = False  # "//models" is unknown, and no redirect to "/models"
    app.config.update(
        MAX_CONTENT_LENGTH=max_body_bytes,
        BODY_TIMEOUT=body_timeout,
        RESPONSE_TIMEOUT=body_timeout,
        MODEL_NAME=model_name,
        REPLICA=str(replica),
        MAY_CONTROL=may_control,
        DESK=desk,
        # The endpoints look these four up:
        client=RecordingClient(client, desk.bounds),
        tokenizer=PromptTokenizer(tokenizer),
        parsers=parsers,
        verbose=verbose,
    )
    for blueprint in endpoints.__all__:
        app.register_blueprint(blueprint)
    _add_models(app, model_name)
    _add_liveness(app)
    app.before_request(_tell_trouble)
    app.before_request(_keep_out)
    app.before_request(_plan)
    app.after_request(_complete)
    app.register_error_handler(ApiError, _answer_api_error)
    app.register_error_handler(HTTPException, _answer_http_error)
    app.register_error_handler(Exception, _answer_fault)
    return app


class BoundedBody(Body):
    """A body that stops growing at its limit, also when nobody announced its length.

    It comes whole or not at all, and takes no more memory than its bytes, however small the pieces
    are that they come in.
    """

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._pieces = bytearray()
        self._whole: bytes | None = None

    def __await__(self) -> Generator[Any, None, bytes]:
        # Where the pieces are kept, and who adds them, is another thing in each version of quart.
        if self._must_raise is None:
            yield from self._complete.wait().__await__()
        if self._must_raise is not None:
            raise self._must_raise
        assert self._whole is not None
        return self._whole

    async def put(self, data: bytes) -> None:
        """Takes the next piece from quart 0.23."""
        self.append(data)

    def append(self, data: bytes) -> None:
        """Takes the next piece, from quart 0.22 on Python 3.12; no more once it is too large."""
        limit = self._max_content_length
        if limit is not None and len(self._pieces) + len(data) > limit:
            self._must_raise = RequestEntityTooLarge()
        if self._must_raise is None:
            self._pieces += data
        else:
            self._pieces = bytearray()
            self.set_complete()

    def set_complete(self) -> None:
        """Ends the body, so that who waits for it gets it."""
        if not self._complete.is_set():
            self._whole = bytes(self._pieces)
            self._pieces = bytearray()
            super().set_complete()

    def clear(self) -> None:
        """Lets go of what has been read."""
        self._whole = b""


class PlannedRequest(Request):
    """A request whose JSON body, once planned, is the plan's normal form.

    Attributes:
        plan: None for requests that need none.
    """

    body_class = BoundedBody
    plan: Plan | None = None

    async def get_json(self, force: bool = False, silent: bool = False, cache: bool = True) -> Any:
        """The normal form, whatever the content type; the plain body without a plan."""
        if self.plan is not None:
            return self.plan.body
        return await super().get_json(force, silent, cache)


class AnswerJSON(DefaultJSONProvider):
    """Completes the endpoints' answers before they become text."""

    def response(self, *args: Any, **kwargs: Any) -> Response:
        """A JSON response."""
        value = self._prepare_response_obj(args, kwargs)
        work = g.get("work")
        if work is not None and isinstance(value, dict) and "choices" in value:
            finish(value, work, current_app.config["MODEL_NAME"])
        return _json(value)


async def _tell_trouble() -> Response | None:
    """Says in megatron-core's stead that requests would not be served, and why."""
    if request.blueprint != "health_api":
        return None
    reason = getattr(current_app.config["client"], "unavailable", None)
    if reason is None:
        return None
    return _json({"status": "error", "ready": False, "details": reason}, 503)


async def _keep_out() -> None:
    """Refuses what the coordinator would not take from this front end, without a word."""
    if request.blueprint == "profile_api" and not current_app.config["MAY_CONTROL"]:
        raise ApiError(
            403,
            "The front ends may submit requests only; start and stop the profiler with an "
            "InferenceClient that has the control key.",
            code="forbidden",
        )


async def _plan() -> None:
    """Checks a request and puts it in the form that its endpoint can read."""
    if request.blueprint not in NAMES or request.method != "POST":
        return
    data = await request.get_data(cache=False)
    request.plan = await current_app.config["DESK"].plan(request.blueprint, data)
    del data
    request.scope.get("body_is_done", lambda: None)()
    g.work = Work(request.plan)


async def _complete(response: Response) -> Response:
    """Makes what an endpoint returned OpenAI's, where it is not yet."""
    work: Work | None = g.get("work")
    if work is not None and not work.finished:
        text = await response.get_data(as_text=True)
        if response.status_code >= 400 and not response.is_json:
            failures, refusals = work.failures(), work.refusals()
            response = _error(errors.of_released(response.status_code, text, failures, refusals))
        elif response.status_code == 200:
            answer = jsons.loads(text)
            finish(answer, work, current_app.config["MODEL_NAME"])
            response = _json(answer)
    response.headers["x-frontend-replica"] = current_app.config["REPLICA"]
    return response


async def _answer_api_error(error: ApiError) -> Response:
    return _error(error)


async def _answer_http_error(error: HTTPException) -> Response:
    reason = error.description or ""
    api_error = errors.of_status(error.code or 500, request.method, request.path, reason)
    response = _error(api_error)
    if isinstance(error, MethodNotAllowed):
        response.headers["Allow"] = ", ".join(sorted(error.valid_methods or ()))
    return response


async def _answer_fault(error: Exception) -> Response:
    logger.error("http_request_failed path=%r", request.path, exc_info=error)
    return _error(errors.internal())


def _error(error: ApiError) -> Response:
    response = _json(error.body, error.status)
    response.headers.extend(error.headers)
    return response


def _json(value: Any, status: int = 200) -> Response:
    return Response(jsons.dumps(value), status=status, mimetype="application/json")


def _add_liveness(app: Quart) -> None:
    async def live() -> Response:
        return _json({"status": "ok"})

    for prefix in ("", "/v1"):
        app.add_url_rule(f"{prefix}/health/live", f"live{prefix}", live)


def _add_models(app: Quart, name: str) -> None:
    model = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "megatron"}

    async def models() -> Response:
        return _json({"object": "list", "data": [model]})

    async def one_model(wanted: str) -> Response:
        if wanted != name:
            raise ApiError(404, f"The model {wanted} does not exist.", code="model_not_found")
        return _json(model)

    for prefix in ("", "/v1"):
        app.add_url_rule(f"{prefix}/models", f"models{prefix}", models)
        app.add_url_rule(f"{prefix}/models/<path:wanted>", f"one_model{prefix}", one_model)


def bounds_of(
    tokenizer: Any,
    vocab_size: int | None,
    max_sequence_tokens: int | None,
    max_request_tokens: int,
) -> Bounds:
    """The bounds of an application's requests; see `build_app`."""
    return Bounds(vocab_size or _vocab_size(tokenizer), max_sequence_tokens, max_request_tokens)


def _vocab_size(tokenizer: Any) -> int | None:
    """How many token ids the tokenizer says there are; None when it does not say."""
    try:
        return int(tokenizer.vocab_size)
    except (AttributeError, NotImplementedError, TypeError, ValueError):
        return None
