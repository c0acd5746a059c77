"""Names the outermost operation of a Python expression: `f(a + b)` is a call.

Run: python -m experiments.train --config=configs/classify.py
Expect: 97.8 percent held-out accuracy, loss 0.070 (bag of words 59.6 percent, 1.068);
308 s of processor time, 554 s on 2 CPU cores that did other work.

--config.data.path=mails.csv trains on your texts and labels.
"""

from mha_haiku import runs


def get_config() -> runs.RunConfig:
    """Returns the config of the run."""
    return runs.default_config("classify").replace(
        task=dict(sequence_length=48),
        model=dict(
            num_layers=3,
            model_size=128,
            dropout_rate=0.1,
            embedding=dict(positions="rotary", max_length=64),
            attention=dict(num_heads=4),
            feed_forward=dict(hidden_size=512),
            output=dict(pool="first"),
        ),
        optimizer=dict(learning_rate=1e-3, warmup_steps=100, weight_decay=0.01),
        training=dict(
            steps=1000, batch_size=32, report_every=100, evaluation_examples=2048
        ),
    )
