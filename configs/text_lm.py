"""Predicts the next character of Python's documentation: a causal language model.

Run: python -m experiments.train --config=configs/text_lm.py
Expect: 67 percent held-out accuracy, loss 1.26 (unigram 24.7 percent, 3.238); 207 s on
2 CPU cores.
"""

from ml_collections import config_dict


def get_config() -> config_dict.ConfigDict:
    """Returns the config of the run."""
    config = config_dict.ConfigDict()
    config.seed = 0  # what every random number of the run is made from

    config.task = config_dict.ConfigDict()
    config.task.name = "language_model"  # what is learned
    config.task.sequence_length = 64  # tokens in an example

    config.data = config_dict.ConfigDict()
    # a UTF-8 file or a folder of them; empty: Python's own documentation
    config.data.path = ""
    config.data.tokenizer = "characters"  # characters or bpe
    config.data.vocabulary_size = 256  # most tokens that the tokenizer may have
    config.data.held_out_fraction = 0.1  # the last part of the text, to evaluate on

    config.model = config_dict.ConfigDict()
    config.model.family = "causal"  # encoder, causal or set_classifier
    config.model.num_layers = 3  # each of attention and a feed-forward part
    config.model.num_heads = 4  # heads of queries, in each layer
    # divides num_heads; None: as many
    config.model.num_key_value_heads = config_dict.placeholder(int)
    config.model.model_size = 128  # width of the residual stream
    # query and key size of a head; None: model_size / num_heads
    config.model.key_size = config_dict.placeholder(int)
    config.model.hidden_size = 512  # width inside the feed-forward part
    config.model.activation = "gelu"  # gelu, gelu_tanh, relu or swiglu
    config.model.norm = "layer_norm"  # layer_norm or rms_norm
    config.model.norm_epsilon = 1e-5  # added to the variance
    config.model.norm_position = "pre"  # pre or post
    config.model.positions = "rotary"  # none, learned, sinusoidal, rotary, alibi or t5
    config.model.max_length = 64  # positions that the model can tell apart
    config.model.dropout_rate = 0.0  # in [0, 1)
    config.model.with_bias = True  # whether projections add a bias
    config.model.qk_norm = False  # whether queries and keys are normalized
    config.model.precision = "float32"  # float32, or bfloat16 to compute in it
    # whether layers are computed again for the gradient, to save memory
    config.model.rematerialize = False
    # whether layers are one compiled loop: less to compile, parameters stacked
    config.model.scan_layers = False
    # keys are mixed with those before them, by a learned share
    config.model.smear_keys = False
    # of a pruned model: the heads that each layer kept, a list of lists
    config.model.kept_heads = config_dict.placeholder(object)
    # of a pruned model: the hidden units of each layer, a list
    config.model.hidden_sizes = config_dict.placeholder(object)

    config.model.attention = config_dict.ConfigDict()
    # auto, dense, blockwise, fused or formula
    config.model.attention.implementation = "auto"

    config.optimizer = config_dict.ConfigDict()
    config.optimizer.learning_rate = 2e-3  # the highest, after warm-up
    config.optimizer.warmup_steps = 100  # in which the learning rate rises from 0
    config.optimizer.final_learning_rate_fraction = 0.1  # where the cosine ends
    config.optimizer.weight_decay = 0.01  # not of biases and norms
    config.optimizer.b1 = 0.9  # decay of Adam's mean of gradients
    config.optimizer.b2 = 0.98  # decay of Adam's mean of squared gradients
    config.optimizer.clip_norm = 1.0  # global norm above which gradients shrink

    config.training = config_dict.ConfigDict()
    config.training.steps = 1500  # in all
    config.training.batch_size = 32  # examples in a step, over all devices
    config.training.steps_per_dispatch = 50  # steps in one compiled call
    config.training.report_every = 100  # steps
    config.training.evaluate_every = 500  # steps
    config.training.evaluation_examples = 1024  # held-out examples
    config.training.checkpoint_every = 500  # steps
    # steps between looks at what heads do, for heads/timeline.png; 0: none
    config.training.timeline_every = 0
    # what follows a step whose loss or gradient is not finite: abort or skip
    config.training.non_finite = "abort"
    config.training.max_skips = 10  # steps skipped in a row; one more ends the run
    config.training.tensorboard = False  # whether TensorBoard files are written too

    config.attention = config_dict.ConfigDict()
    config.attention.examples = 8  # examples whose maps are kept
    config.attention.dtype = "float16"  # float16 or float32
    config.attention.full_length = 256  # longer inputs get pooled maps
    config.attention.pooled_size = 128  # rows and columns of a pooled map

    config.devices = config_dict.ConfigDict()
    # parts that each batch is shared in; None: as many as heads and sequence leave
    config.devices.data = config_dict.placeholder(int)
    config.devices.heads = 1  # parts of the heads and hidden units; divides them
    config.devices.sequence = 1  # parts of the positions; divides them
    # whether parameters and the optimizer's state are shared over data as well
    config.devices.shard_parameters = False

    return config
