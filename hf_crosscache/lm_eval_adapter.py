"""lm-evaluation-harness on a translated target: the source model reads each context, the target goes on from the translated cache.

    python -m hf_crosscache.lm_eval_adapter --model hf_crosscache --model_args translator=my_translator --tasks hellaswag

is the harness's own command line with one model more, `hf_crosscache`. It needs the `lm_eval` extra.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM

from .cache import TranslatedCache
from .compat import cache_argument, prefill
from .continuations import score
from .errors import HandOffError
from .translator import CacheTranslator

try:
    from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]
    from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]
    from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise ImportError(f"{error}: the adapter needs lm-evaluation-harness; pip install -e '.[lm_eval]'.") from error

_HFLM: Any = HFLM  # a decorator of the harness hides its type


@register_model("hf_crosscache")
class TranslatedLM(_HFLM):
    """A target model of the harness that never reads a context itself, but for its last tokens.

    `loglikelihood`: the source reads the context once for all its continuations, the target scores those from the translated cache.
    `generate_until`: the source reads the prompt, the target generates. `loglikelihood_rolling`: of each window of `max_length` tokens,
    the first half is read by the source; a text's first window has nothing before it, and is the target's own. A context of one token
    is the target's own as well.

    Args:
        translator: folder of the translator.
        source, target: Hub names or folders of the models; None for where they were at the fit.
        recompute_last: last tokens of each context that are left to the target, one at least.
        batch_size: contexts at once; all their continuations are scored together.
        settings: of the harness's `hf` model, for the target: `dtype`, `max_length`, `add_bos_token`, ...

    Raises:
        GeometryError, IdentityError: a model or the tokenizer is not the translator's.
        HandOffError: recompute_last below one, or a batch size that is not a number.
    """

    def __init__(
        self,
        translator: str,
        source: str | None = None,
        target: str | None = None,
        recompute_last: int = 1,
        batch_size: int | str = 1,
        device: str | None = None,
        **settings: Any,
    ) -> None:
        if recompute_last < 1 or not str(batch_size).isdigit():
            raise HandOffError(
                f"recompute_last = {recompute_last}, batch_size = {batch_size}: 1 at least expected, since the last token of a context "
                "predicts what follows, and a number of contexts at once."
            )
        loaded = CacheTranslator.from_pretrained(translator)
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        super().__init__(target or loaded.target.name, batch_size=batch_size, device=device, **settings)
        self.source_model = AutoModelForCausalLM.from_pretrained(
            source or loaded.source.name, dtype=self.model.dtype, device_map=self.device
        ).eval()  # fmt: skip
        loaded.check(source_model=self.source_model, target_model=self.model, tokenizer=self.tokenizer)
        self.translator, self.recompute_last = loaded.to(self.device), recompute_last

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Score whole texts window by window."""
        totals = []
        for request in tqdm(requests, desc="texts", disable=disable_tqdm):
            (text,) = request.args
            windows = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, self.max_length // 2)
            scored = self._loglikelihood_tokens([(None, *make_disjoint_window(window)) for window in windows], disable_tqdm=True)
            totals.append(sum(likelihood for likelihood, _ in scored))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), totals[-1])
        return totals

    def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = False, override_bs: int | None = None) -> list[tuple[float, bool]]:
        """Score (texts, context ids, continuation ids) of any lengths."""
        of_context: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        for index, (_, context, continuation) in enumerate(requests):
            room = self.max_length + 1 - len(continuation)
            of_context[tuple(context[max(0, len(context) - room) :])].append(index)
        # Of one length as far as may be, the longest first, so that a batch that does not fit shows at once.
        contexts = sorted(of_context, key=len, reverse=True)
        alone = [context for context in contexts if len(context) == 1]
        batches = [group[at : at + self.batch_size] for group in (contexts[: len(contexts) - len(alone)], alone)
                   for at in range(0, len(group), self.batch_size)]  # fmt: skip
        answers: dict[int, tuple[float, bool]] = {}
        with tqdm(total=len(requests), desc="continuations", disable=disable_tqdm) as progress:
            for batch in batches:
                rows = [(row, index) for row, context in enumerate(batch) for index in of_context[context]]
                continuations = [requests[index][2] for _, index in rows]
                for (_, index), answer in zip(rows, self._score(batch, [row for row, _ in rows], continuations), strict=True):
                    answers[index] = answer
                    if requests[index][0] is not None:
                        self.cache_hook.add_partial("loglikelihood", requests[index][0], answer)
                progress.update(len(rows))
        return [answers[index] for index in range(len(requests))]

    def _score(
        self, contexts: Sequence[Sequence[int]], rows: list[int], continuations: Sequence[Sequence[int]]
    ) -> list[tuple[float, bool]]:
        """Score continuations, the n-th behind the context `rows[n]`."""
        if len(contexts[0]) == 1:
            tails, cache, mask = [contexts[row] for row in rows], TranslatedCache.empty(self.model), None
        else:
            width = len(contexts[0])
            ids = torch.tensor([[0] * (width - len(context)) + list(context) for context in contexts], device=self.device)
            mask = torch.tensor([[0] * (width - len(context)) + [1] * len(context) for context in contexts], device=self.device)
            cache = self._hand_over(ids, mask)
            held = cache.get_seq_length()
            cache.batch_select_indices(torch.tensor(rows, device=self.device))
            tails, mask = [ids[row, held:].tolist() for row in rows], mask[rows, :held]
        likelihoods, likeliest = score(self.model, cache, tails, continuations, mask)
        return [(total.item(), bool(greedy.all())) for total, greedy in zip(likelihoods, likeliest, strict=True)]

    def _hand_over(self, ids: torch.Tensor, mask: torch.Tensor) -> TranslatedCache:
        """Let the source read left-padded contexts `[B, C]`, and translate them but for the last tokens, of which one at least is left."""
        source_cache, _ = prefill(self.source_model, ids, attention_mask=mask)
        left = max(1, min(self.recompute_last, int(mask.sum(1).min()) - 1))
        return TranslatedCache(
            source_cache, self.translator, target_model=self.model, input_ids=ids, attention_mask=mask, recompute_last=left
        )  # fmt: skip

    def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **settings: Any) -> torch.Tensor:
        cache = self._hand_over(context, settings["attention_mask"])
        return super()._model_generate(context, max_length, stop, **cache_argument(cache), **settings)


if __name__ == "__main__":
    cli_evaluate()
