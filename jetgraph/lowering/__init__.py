"""What a lowered graph calls: operators, the providers of their kernels, and the definition of both."""

from jetgraph.lowering.first_calls import make_first_calls

make_first_calls()
