"""What is known of the tokens that a client trains on."""

from __future__ import annotations

from typing import Any

import numpy as np

from pipelinerl.tinker.backend import Publication
from pipelinerl.tinker.ledger import Ledger
from pipelinerl.tinker.provenance import Facts, Provenance, Span

PUBLICATIONS = {
    0: Publication(model_id="", num_steps=0),
    1: Publication(model_id="m", num_steps=2),
    2: Publication(model_id="m", num_steps=5),
}


def provenance(**options: int) -> Provenance:
    found = Provenance(PUBLICATIONS, ledger=Ledger(None), **options)
    found.sampled("s/0", tokens=np.array([7, 8, 9], np.int32), versions=np.array([1, 1, 2], np.int32))
    return found


def spans(*, offset: int = 0, length: int = 3, name: str = "s/0") -> list[Span]:
    return [
        Span(sequence_id=name, is_sampled=False, offset=0, length=1),
        Span(sequence_id=name, is_sampled=True, offset=offset, length=length),
    ]


def look(found: Provenance, *, targets: list[int], model_id: str = "m", num_steps: int = 6, **options: Any) -> Facts:
    return found.look(spans(**options), targets=np.array(targets, np.int32), model_id=model_id, num_steps=num_steps)


def test_ages_are_steps_of_the_model_since_the_weights_that_sampled_each_token():
    facts = look(provenance(), targets=[0, 7, 8, 9])
    assert facts.num_joined == 3
    assert facts.ages == {4: 2, 1: 1}
    assert facts.max_age == 4
    assert facts.metrics()["pipelinerl/staleness_mean"] == 3.0


def test_tokens_that_are_others_than_were_sampled_have_drifted():
    assert look(provenance(), targets=[0, 7, 1, 1]).num_drifted == 2


def test_training_a_second_time_is_counted_by_token_and_by_model():
    found = provenance()
    found.trained(spans(length=2), model_id="m")
    assert look(found, targets=[0, 7, 8, 9]).num_repeated == 2
    assert look(found, targets=[0, 7, 8, 9], model_id="n").num_repeated == 0


def test_what_another_model_sampled_has_no_age():
    facts = look(provenance(), targets=[0, 7, 8, 9], model_id="n")
    assert facts.num_foreign == 3
    assert not facts.ages


def test_the_base_is_as_old_as_the_model_has_steps():
    found = Provenance(PUBLICATIONS, ledger=Ledger(None))
    found.sampled("s/0", tokens=np.array([7], np.int32), versions=np.array([0], np.int32))
    assert look(found, targets=[0, 7], length=1).ages == {6: 1}


def test_what_was_not_sampled_here_is_unknown():
    found = provenance()
    unknown = found.look(spans(name="s/9"), targets=np.zeros(4, np.int32), model_id="m", num_steps=0)
    assert unknown.num_unknown == 3
    assert not unknown.num_joined
    assert look(found, targets=[0, 8, 9, 1], offset=1).num_unknown == 3, "one more than was sampled"


def test_the_oldest_sequences_are_forgotten_first():
    found = provenance(max_tokens=4)
    found.sampled("s/1", tokens=np.array([1, 2], np.int32), versions=np.array([1, 1], np.int32))
    assert look(found, targets=[0, 7, 8, 9]).num_unknown == 3
    assert found.look(spans(name="s/1", length=2), targets=np.array([0, 1, 2], np.int32), model_id="m", num_steps=2).num_joined == 2


def test_facts_of_several_data_add_up():
    facts = look(provenance(), targets=[0, 7, 8, 9])
    facts.add(look(provenance(), targets=[0, 7, 8, 1]))
    assert (facts.num_joined, facts.num_drifted, facts.ages) == (6, 1, {4: 4, 1: 2})
