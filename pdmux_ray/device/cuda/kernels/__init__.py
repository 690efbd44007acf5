"""The Triton kernels of a decoder: plain functions over tensors, which write into the `out` that they are given.

Contract of co-residency
    A lane has a part of the GPU, and the other lane may hold the rest for as long as it likes. So no kernel here waits for
    another of its CTAs: no atomics, no locks, no spinning, no cooperative launch. A CTA reads what was there before the launch
    and writes what no other CTA reads or writes. A kernel therefore ends, with the same result, however few of its CTAs fit at
    a time and in whatever order they run. Where a result needs several CTAs (attention split over the context), a second
    launch on the same stream puts it together.

    How many CTAs a launch has follows from shapes and from the lane's SMs, which are an argument: device properties are
    never read. It never follows from what the tensors hold, so a captured graph can be replayed with other contexts.

Common to all
    Tensors are dense in their last dimension. float16 and bfloat16, and float32 for tests; sums are in float32. Nothing is
    allocated. Each variant is compiled on its first launch, hence in the warm-up.
"""
