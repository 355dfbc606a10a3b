"""How far a KV cache may lag: by a limit, and by what the trainer measures; worked by hand."""

from orchestrator.rules.kv import MIN_TOKENS, PATIENCE, KvSpan


def spans(rule: KvSpan, kls: list[float], *, num_tokens: float = MIN_TOKENS, first: int = 0) -> list[int | None]:
    found = []
    for step, kl in enumerate(kls, start=first):
        rule.measured(step=step, kl=kl, num_tokens=num_tokens)
        found.append(rule.span)
    return found


def test_without_a_bound_only_the_limit_counts():
    assert spans(KvSpan(limit=3), [1.0, 1.0]) == [3, 3]
    assert spans(KvSpan(), [1.0]) == [None]


def test_a_measured_kl_beyond_the_bound_shortens_the_span_once_it_can_be_seen():
    rule = KvSpan(limit=2, bound=0.01)
    # Shortened to 1 by step 0; steps 1 and 2 still show sequences of the span before. To 0 by step 2, and no shorter.
    assert spans(rule, [0.02, 0.02, 0.02, 0.02, 0.02]) == [1, 1, 0, 0, 0]


def test_no_limit_becomes_one_where_the_bound_is_exceeded_and_comes_back():
    rule = KvSpan(bound=0.01)
    assert spans(rule, [0.005, 0.02]) == [None, 8]
    known_from = 2 + 8
    assert spans(rule, [0.001] * (PATIENCE - 1), first=known_from) == [8] * (PATIENCE - 1)
    assert spans(rule, [0.001], first=known_from + PATIENCE - 1) == [None]


def test_between_half_the_bound_and_the_bound_nothing_changes_and_patience_starts_anew():
    rule = KvSpan(limit=3, bound=0.01)
    spans(rule, [0.02])
    assert rule.span == 2
    low = [0.001] * (PATIENCE - 1)
    assert spans(rule, [*low, 0.007, *low], first=10)[-1] == 2
    assert spans(rule, [0.001], first=40) == [3]
    assert spans(rule, [0.001] * 40, first=50)[-1] == 3, "no further than the limit"


def test_a_mean_over_few_tokens_is_no_evidence():
    assert spans(KvSpan(limit=3, bound=0.01), [0.5], num_tokens=MIN_TOKENS - 1) == [3]
