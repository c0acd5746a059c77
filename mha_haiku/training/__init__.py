"""Training as pure functions of arrays: loss, optimizer, step and evaluation.

All randomness comes from (seed, step, index of the example): a batch is the same on any
number of devices, and resuming needs only the `TrainState`. A dispatch runs many steps
in one program, which do not change its bits, and ends after a step whose loss or
gradient is not finite. Losses and metrics are passed on as sums and weights, whose
means are computed at the end, on the host, in float64. `devices` decides where arrays
are; files and progress are in `runs`. Data that must survive a kill is a field of
`TrainState`; another random stream is a name at the end of `_STREAMS`.
"""
