"""One answer on its way to the client: tokens become text, and outputs are due every so many tokens."""

from __future__ import annotations

from math import nan

from hybridtrt.runtime.request import FinishReason, Output, Request, TopLogProbs
from hybridtrt.runtime.text_stream import TextStream


class Answer:
    """Collects what was sampled until an output of `stream_interval` tokens is due.

    With stop words each token is read as it comes: the answer ends at the token that completes one. Otherwise the
    tokens of an output are read together.
    """

    __slots__ = (  # those that `next` needs stand together
        *("_interval", "_next_text", "_request_id", "index", "due", "direct", "_tokens", "_text", "_params", "_eager"),
        *("_scored", "_unread", "_pieces", "_log_probs", "_top", "_prompt", "num_prompt_scores"),
    )

    def __init__(self, request: Request, index: int, text: TextStream | None) -> None:
        self.index = index  # which of the request's n answers
        self.due = False  # whether what has not been taken yet is as long as the request wants an output
        self._request_id, self._text = request.id, text
        self._next_text = None if text is None else text.next
        self._params = params = request.params
        self._interval = params.stream_interval
        self._eager = any(params.stop_words)
        self._scored = params.return_log_probs or params.top_log_probs > 0 or params.prompt_log_probs is not None
        self.direct = not (self._eager or self._scored)  # whether `next` can be called
        self._tokens: list[int] = []
        self._unread: list[int] = []
        self._pieces: list[str] = []
        self._log_probs: list[float] = []
        self._top: list[TopLogProbs] = []
        self._prompt: list[tuple[float, TopLogProbs]] = []
        self.num_prompt_scores = 0  # prompt tokens whose log-probabilities have been added

    def push(self, token: int, log_prob: float, top: TopLogProbs, visible: bool = True) -> bool:
        """Add a token, which has text if it is `visible`; true when it completes a stop word."""
        self._tokens.append(token)
        self.due = len(self._tokens) >= self._interval
        if self._scored:
            self._push_scores(log_prob, top)
        if self._text is None:
            return False
        if visible:
            self._unread.append(token)
        return (self._eager or self.due) and self._read(self._text)

    def next(self, token: int) -> Output | None:
        """`push` and `take` for an answer without stop words and scores that goes on; None: no output is due."""
        if self._interval > 1:
            self.push(token, nan, ())
            return self.take() if self.due else None
        try:
            text = "" if self._next_text is None else self._next_text(token)
        except Exception:
            self._tokens.append(token)  # it goes with the error
            raise
        output = Output.__new__(Output)  # what is left out stays as in the class: a third of the time less
        output.request_id, output.token_ids, output.text, output.index = self._request_id, (token,), text, self.index
        return output

    def push_prompt(self, log_probs: tuple[tuple[float, TopLogProbs], ...]) -> None:
        """Add log-probabilities of the next tokens of the prompt."""
        self._prompt.extend(log_probs)
        self.num_prompt_scores += len(log_probs)

    def finish(self) -> bool:
        """Turn into text what is held back, when no more will come; true when that completes a stop word."""
        if self._text is None or self._read(self._text):
            return self._text is not None
        rest, stopped = self._text.finish()
        self._pieces.append(rest)
        return stopped

    def take(self, reason: FinishReason | None = None, error: str | None = None, more: bool = False) -> Output:
        """What has not been taken yet."""
        text = ""
        if self._pieces:
            text = "".join(self._pieces)
            self._pieces.clear()
        output = Output(self._request_id, tuple(self._tokens), text, (), reason, error, self.index, more)
        self._tokens.clear()
        self.due = False
        if self._scored:
            output.log_probs, output.top_log_probs = tuple(self._log_probs), tuple(self._top)
            output.prompt_log_probs = tuple(self._prompt)
            self._log_probs, self._top, self._prompt = [], [], []
        return output

    def _push_scores(self, log_prob: float, top: TopLogProbs) -> None:
        if self._params.return_log_probs:
            self._log_probs.append(log_prob)
        if self._params.top_log_probs:
            self._top.append(top)

    def _read(self, text: TextStream) -> bool:
        if not self._unread:
            return False
        piece, stopped = text.push_many(self._unread)
        self._unread.clear()
        self._pieces.append(piece)
        return stopped
