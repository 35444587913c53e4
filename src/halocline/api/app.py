"""The routes: /v1/completions, /v1/chat/completions, /v1/models, /health, /metrics."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from halocline.api.answer import CLIENT_GONE, Answer
from halocline.api.body import read_object
from halocline.api.errors import ApiError, api_error, error_response
from halocline.api.fields import known_name
from halocline.api.keys import check_key
from halocline.api.link_door import LinkDoor
from halocline.api.ports import Front
from halocline.api.requests import CompletionOrder, Prompt, read_chat, read_completion
from halocline.api.shapes import ChatShape, CompletionShape
from halocline.api.sse import ClientGoneError
from halocline.errors import RequestError

logger = logging.getLogger(__name__)

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FALLBACK_WARNING = "the model has no chat template; messages are written as 'role: content' lines"

Endpoint = Callable[[Request], Awaitable[Response]]


def create_app(front: Front, *, api_key: str | None = None, link_token: str | None = None) -> FastAPI:
    """Return the ASGI application that serves `front`; with `api_key`, /v1 asks for it as a bearer token.

    `link_token`: who shows it may say which worker computes a prompt; None: nobody may.
    """
    app = FastAPI(title="Halocline", openapi_url=None, redirect_slashes=False)
    routes = Routes(front, api_key, LinkDoor(link_token))
    app.add_api_route("/v1/completions", routes.guard(routes.completions), methods=["POST"])
    app.add_api_route("/v1/chat/completions", routes.guard(routes.chat), methods=["POST"])
    app.add_api_route("/v1/models", routes.guard(routes.models), methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", routes.guard(routes.one_model), methods=["GET"])
    app.add_api_route("/v1/worker", routes.guard(routes.worker, asks_key=False), methods=["GET"])
    app.add_api_route("/health", routes.health, methods=["GET"])
    app.add_api_route("/metrics", routes.metrics, methods=["GET"])
    app.add_exception_handler(HTTPException, routes.no_route)
    return app


class Routes:
    """The endpoints of one front end."""

    def __init__(self, front: Front, api_key: str | None, door: LinkDoor) -> None:
        self._front = front
        self._door = door
        self._api_key = None if api_key is None else api_key.encode()
        self._has_warned = False

    def guard(self, endpoint: Endpoint, *, asks_key: bool = True) -> Endpoint:
        """Return the endpoint behind the key check, with its errors in OpenAI's shape and its answers counted."""

        async def guarded(request: Request) -> Response:
            request_id = f"req-{uuid.uuid4().hex}"
            try:
                if asks_key:
                    check_key(request, self._api_key)
                response = await endpoint(request)
            except (ClientDisconnect, ClientGoneError):
                response = Response(status_code=CLIENT_GONE)
            except Exception as error:
                told = api_error(error)
                response = error_response(told)
                # Not the message: it may quote what the client sent.
                logger.info(
                    "event=refused request=%s route=%s status=%d code=%s param=%s",
                    request_id,
                    endpoint.__name__,
                    told.status,
                    told.code,
                    known_name(told.param),
                )
            # An answer that was begun has an id of its own.
            response.headers.setdefault("x-request-id", request_id)
            self._front.metrics.responded(endpoint.__name__, response.status_code)
            return response

        return guarded

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        prefill_at = self._door.prefill_at(request.headers)
        order = read_completion(await read_object(request), self._front.facts.vocab_size)
        self._check_model(order.model)
        prompts = [await self._encode(prompt) for prompt in order.prompts]
        echoes = self._echoes(order, prompts)
        shape = CompletionShape(self._front, echoes, logprobs=order.params.logprobs is not None)
        return await Answer(self._front, shape, order, prompts, prefill_at).respond(request, {})

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        prefill_at = self._door.prefill_at(request.headers)
        order = read_chat(await read_object(request))
        self._check_model(order.model)
        prompt = await self._front.encode_chat(order.messages)
        shape = ChatShape(self._front, logprobs=order.params.logprobs is not None)
        headers = {} if self._front.has_chat_template else self._warn()
        try:
            return await Answer(self._front, shape, order, [prompt], prefill_at).respond(request, headers)
        except RequestError as error:
            # The engine knows prompts only; the client has sent messages.
            error.param = "messages" if error.param == "prompt" else error.param
            raise

    async def _encode(self, prompt: Prompt) -> tuple[int, ...]:
        ids = await self._front.encode(prompt) if isinstance(prompt, str) else prompt
        if not prompt or not ids:
            raise ApiError(400, "the prompt is empty", param="prompt", code="empty_prompt")
        return ids

    def _echoes(self, order: CompletionOrder, prompts: list[tuple[int, ...]]) -> list[str]:
        if not order.echo:
            return [""] * (len(prompts) * order.params.n)
        texts = [
            prompt if isinstance(prompt, str) else self._front.decode(ids)
            for prompt, ids in zip(order.prompts, prompts, strict=True)
        ]
        return [text for text in texts for _ in range(order.params.n)]

    def _warn(self) -> dict[str, str]:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("event=no_chat_template message=%r", FALLBACK_WARNING)
        return {"x-halocline-warning": FALLBACK_WARNING}

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        del request
        return _json({"object": "list", "data": [self._model()]})

    async def one_model(self, request: Request) -> Response:
        """GET /v1/models/{name}."""
        self._check_model(request.path_params["name"])
        return _json(self._model())

    def _model(self) -> dict[str, Any]:
        front = self._front
        return {
            "id": front.model_name,
            "object": "model",
            "created": front.created,
            "owned_by": "halocline",
            "max_model_len": front.facts.max_model_len,
        }

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._front.model_name:
            message = f"the model {name!r} does not exist here; this server has {self._front.model_name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def worker(self, request: Request) -> Response:
        """GET /v1/worker: what a router asks of a worker of its group; 200 in every state that can still speak."""
        self._door.check(request.headers)
        return _json(self._front.worker())

    async def health(self) -> Response:
        """GET /health: 200 when work goes forward, else 503; the body says why."""
        verdict = self._front.health()
        return _json(verdict.body(), 200 if verdict.is_healthy else 503)

    async def metrics(self) -> Response:
        """GET /metrics, for Prometheus."""
        return Response(self._front.metrics.render(), media_type=METRICS_TYPE)

    async def no_route(self, request: Request, error: Exception) -> Response:
        """Answer for an unknown path or method in the same shape as all errors."""
        assert isinstance(error, HTTPException)
        self._front.metrics.responded("other", error.status_code)
        message = f"{request.method} {request.url.path}: {error.detail}"
        headers = dict(error.headers or {})
        return error_response(ApiError(error.status_code, message, code="not_found", headers=headers))


def _json(body: dict[str, Any], status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
