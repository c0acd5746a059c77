"""Placeholder: the real module is being written."""


def refusal(inputs, dropout_rate, platform):
    del inputs, dropout_rate
    return f"there is no fused kernel for {platform}"


def attend(inputs, dropout_rate):
    raise NotImplementedError
