"""Which targets a wrapped model is measured on, and by which metric and unit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mha_haiku as mh

H, D, V = 2, 8, 11


@pytest.fixture(scope="module")
def params():
    shapes = {"embedding": (V, D)} | {name: (D, D) for name in "qkvo"}
    rng = np.random.default_rng(0)
    return {name: jnp.float32(rng.normal(size=x)) for name, x in shapes.items()}


def _logits(params, tokens, mask, is_causal):
    x = params["embedding"][tokens]
    q, k, v = (
        (x @ params[name]).reshape(*x.shape[:2], H, -1).swapaxes(1, 2) for name in "qkv"
    )
    scores = q @ k.swapaxes(2, 3)
    size = tokens.shape[1]
    if is_causal:
        scores = jnp.where(jnp.tril(jnp.ones((1, 1, size, size), bool)), scores, -1e9)
    if mask is not None:
        scores = jnp.where(mask[:, None, None] > 0, scores, -1e9)
    heads = (jax.nn.softmax(scores) @ v).swapaxes(1, 2).reshape(x.shape)
    return (x + heads @ params["o"]) @ params["embedding"].T


def causal(params, input_ids, attention_mask=None):
    return _logits(params, input_ids, attention_mask, True)


def seeing(params, input_ids, attention_mask=None):
    """Every query sees every token, the next one too."""
    return _logits(params, input_ids, attention_mask, False)


def _ablation(subject, **inputs):
    inputs = {name: np.array(x) for name, x in inputs.items()}
    return subject.importance("ablation", examples=inputs).mean


@pytest.mark.parametrize("count", [1, 3])
def test_labels_behind_padding_at_the_left_count_as_those_of_the_text_alone(
    params, count
):
    subject, text = mh.wrap(causal, params), [5, 9, 2, 7]
    zeros = [0] * count
    padded = {"input_ids": [zeros + text], "attention_mask": [zeros + [1] * 4]}
    alone = _ablation(subject, input_ids=[text])
    labels = [[-100] * count + text]
    np.testing.assert_allclose(_ablation(subject, **padded), alone, rtol=1e-4)
    np.testing.assert_allclose(
        _ablation(subject, **padded, labels=labels), alone, rtol=1e-4
    )


def test_labels_at_padding_do_not_count_where_the_model_predicts_each_token(params):
    subject = mh.wrap(seeing, params)
    subject = subject.replace(codec=subject.codec._replace(predicts_next=False))
    padded = {"input_ids": [[0, 5, 9, 2]], "attention_mask": [[0, 1, 1, 1]]}
    alone = _ablation(subject, input_ids=[[5, 9, 2]], labels=[[4, -100, 3]])
    found = _ablation(subject, **padded, labels=[[1, 4, -100, 3]])
    np.testing.assert_allclose(found, alone, rtol=1e-4)


TOKENS = [[5, 9, 2, 7]]


def test_the_loss_of_a_next_token_that_the_model_sees_is_refused(params):
    subject = mh.wrap(seeing, params, name="BERT")
    with pytest.raises(ValueError, match="'BERT', which sees it.*\n.*labels.*metric="):
        subject.importance("ablation", examples=np.array(TOKENS))
    with pytest.raises(ValueError, match="which sees it"):
        mh.wrap(seeing, params, examples=np.array(TOKENS)).measured()
    # Roles, maps and other metrics need no targets.
    mh.wrap(seeing, params, examples=np.array(TOKENS)).roles()
    mean = lambda logits, _: logits.mean((1, 2))  # noqa: E731
    mh.wrap(seeing, params, metric=mean).importance("ablation", np.array(TOKENS))


def test_labels_of_a_model_that_sees_all_tokens_are_measured(params):
    found = _ablation(mh.wrap(seeing, params), input_ids=TOKENS, labels=[[1, 2, 3, 4]])
    assert np.isfinite(found).all()


class _Letters:
    mask_token_id, all_special_ids = 0, (0, 1)

    def encode(self, text):
        return [ord(x) % V for x in text]

    def decode(self, tokens):
        return "".join(chr(97 + token) for token in tokens)


def test_hidden_tokens_are_a_share_of_each_text_the_same_in_every_batch(params):
    subject = mh.wrap(seeing, params, _Letters(), mask_probability=0.3)
    tokens = np.random.default_rng(0).integers(1, V, (50, 20))
    (batch,) = subject.measured(tokens).batches
    hidden = batch.weights > 0
    assert 0.25 < hidden[tokens > 1].mean() < 0.35
    assert hidden.any(1).all() and not hidden[tokens == 1].any()
    np.testing.assert_array_equal(batch.inputs, np.where(hidden, 0, tokens))
    alone = subject.measured(tokens[7:8]).batches[0].inputs
    np.testing.assert_array_equal(alone, batch.inputs[7:8])
    losses = mh.heads.metrics.loss(seeing(params, batch.inputs), batch)
    wanted = (losses * hidden.sum(1)).sum() / hidden.sum()
    np.testing.assert_allclose(subject.metrics(examples=tokens)["loss"], wanted, 1e-5)
    assert "loss of hidden tokens" in subject.importance("ablation", tokens).first.label
    with pytest.raises(ValueError, match="needs a tokenizer with a mask token"):
        mh.wrap(seeing, params, mask_probability=0.3)


def test_every_table_of_importance_names_its_metric_and_unit(params):
    def spread(logits, _):
        return logits.std((1, 2))

    def of(subject):
        column = subject.importance("ablation", examples=np.array(TOKENS)).first
        by_hand = mh.heads.ablation(subject.measured(np.array(TOKENS))).first
        assert (by_hand.unit, by_hand.label) == (column.unit, column.label)
        return column.unit, column.label

    change = "change of the {} when the head is ablated"
    next_token = change.format("loss of the next token")
    assert of(mh.wrap(causal, params)) == ("nats", next_token)
    found = of(mh.wrap(causal, params, metric=spread))
    assert found == ("units of spread", change.format("spread"))
    mistakes = mh.heads.metrics.mistakes()
    found = of(mh.wrap(causal, params, metric=mistakes))
    assert found == ("share of right answers", change.format("accuracy"))


def test_maps_of_two_texts_are_not_compared_under_the_tokens_of_one(params):
    subject = mh.wrap(causal, params, _Letters())
    one, other = subject.maps("abcd"), subject.maps("abxd")
    with pytest.raises(ValueError, match="compare must be maps of the same text.*\n"):
        mh.show(one, compare=other)
    same = subject.ablated((0, 1)).maps("abcd")
    assert "ablated" in mh.show(one, compare={"ablated": same}).html
    # Labels that are given suit both, and arrays without a text have the text's.
    assert mh.show(one, compare=other, tokens=["a", "b", "c or x", "d"])
    assert mh.show(one, compare=[x.weights() for x in other])
