"""From a source graph to a TensorRT network, node by node, with TensorRT's own layers.

`api` picks the module (`tensorrt` or `tensorrt_rtx`), `plan` says what to write, `network` holds the
network while it grows, `standard`, `linear`, `attention` and `ours` say what each op becomes, and
`readback` checks the network that came out.
"""
