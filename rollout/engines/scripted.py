"""An engine that replays given outputs: the executor of a runbook, and tests of loops."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from rollout.errors import EngineError, InvalidRequest
from rollout.protocols import (
    EngineCaps,
    EngineState,
    EngineStatus,
    FinishKind,
    GenerateRequest,
    GenerateResult,
    UpdateReport,
    VersionSpan,
    WeightSnapshot,
)


class ScriptedEngine:
    """Request k of a session gets output k of that session's script.

    What it says was not sampled: its log-probs are 0, and what comes of it is data for
    supervised training only.
    """

    engine_id = "scripted"

    def __init__(
        self,
        scripts: Mapping[str, Sequence[Sequence[int]]],
        *,
        vocab_size: int,
        context_len: int,
        max_sessions: int = 128,
    ) -> None:
        self._scripts = scripts
        self._cursor: dict[str, int] = {}
        self._version = 0
        self._caps = EngineCaps(
            seeded_sampling=True,
            hybrid=False,
            vocab_size=vocab_size,
            context_len=context_len,
            max_sessions=max_sessions,
        )

    @property
    def caps(self) -> EngineCaps:
        """Static capabilities."""
        return self._caps

    async def open_sessions(self, session_ids: Sequence[str]) -> None:
        """Start the scripts of these sessions from their beginning."""
        for session in session_ids:
            if session not in self._scripts:
                raise InvalidRequest(f"no script for session {session}")
            self._cursor[session] = 0
        if len(self._cursor) > self._caps.max_sessions:
            raise InvalidRequest(
                f"{len(self._cursor)} sessions are open; at most {self._caps.max_sessions} may be"
            )

    async def close_session(self, session_id: str) -> None:
        """Forget where the session stood."""
        self._cursor.pop(session_id, None)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """The next output of the session, cut at the requested length."""
        session = request.session_id or ""
        if session not in self._cursor:
            raise InvalidRequest(f"session {session!r} is not open")
        if len(request.input_ids) >= self._caps.context_len:
            raise InvalidRequest(
                f"a prompt of {len(request.input_ids)} tokens; the context is "
                f"{self._caps.context_len}"
            )
        for token in request.input_ids:
            if not 0 <= token < self._caps.vocab_size:
                raise InvalidRequest(f"id {token} is outside 0..{self._caps.vocab_size - 1}")
        script, turn = self._scripts[session], self._cursor[session]
        if turn == len(script):
            raise EngineError(f"the script of session {session} ends after {turn} outputs")
        self._cursor[session] = turn + 1
        output = tuple(script[turn][: request.sampling.max_new_tokens])
        stopped = output[-1:] != () and output[-1] in request.sampling.stop_token_ids
        return GenerateResult(
            request_id=request.request_id,
            output_ids=output,
            logprobs=(0.0,) * len(output),
            finish=FinishKind.STOP if stopped else FinishKind.LENGTH,
            matched_stop=output[-1] if stopped else None,
            spans=(VersionSpan(self._version, 0, len(output)),),
            prompt_tokens=len(request.input_ids),
            cached_tokens=0,
            engine_id=self.engine_id,
            latency_s=0.0,
        )

    async def score(self, ids: Sequence[int], start: int, temperature: float) -> tuple[float, ...]:
        """There is no distribution to score under."""
        raise EngineError("a scripted engine has no log-probs")

    async def abort(self, request_ids: Collection[str] | None = None) -> None:
        """Nothing is ever in flight."""

    async def pause(self) -> None:
        """Nothing is ever in flight."""

    async def resume(self) -> None:
        """Nothing is ever held."""

    async def update_weights(self, snapshot: WeightSnapshot) -> UpdateReport:
        """Label later outputs with the version; the script stays."""
        self._version = snapshot.version
        return UpdateReport(version=snapshot.version, seconds=0.0, updated=(self.engine_id,))

    async def status(self) -> tuple[EngineStatus, ...]:
        """One entry."""
        return (EngineStatus(self.engine_id, EngineState.READY, self._version, 0, 0),)

    async def aclose(self) -> None:
        """Nothing to release."""
