"""Costs of published models, layer by layer, derived from their shapes.

FLOPs count a multiply-add as two. A product of an m x k and a k x n matrix takes 2 m k n forward
and twice that backward (one product for each of its two gradients). Elementwise work, norms and
softmaxes over attention weights are left out: they are small beside the products. Bytes are those
of two-byte numbers (bfloat16). One microbatch is one sequence or one image.
"""

from __future__ import annotations

from pipemesh.partition import LayerCost

BYTES = 2


def attention(name, tokens, width):
    # Queries, keys, values and the output are products with width x width matrices; scores and
    # their use of the values are tokens x tokens x width each.
    flops = 4 * 2 * tokens * width**2 + 2 * 2 * tokens**2 * width
    return LayerCost(
        flops,
        parameter_bytes=BYTES * 4 * width**2,
        activation_bytes=BYTES * 6 * tokens * width,
        boundary_bytes=BYTES * tokens * width,
        name=name,
    )


def feed_forward(name, tokens, width, hidden, active=1.0, experts=1):
    # `active`: experts that each token visits; all of them have weights.
    return LayerCost(
        active * 2 * 2 * tokens * width * hidden,
        parameter_bytes=BYTES * experts * 2 * width * hidden,
        activation_bytes=BYTES * tokens * (width + 2 * active * hidden),
        boundary_bytes=BYTES * tokens * width,
        name=name,
    )


def embedding(tokens, width, vocabulary):
    # A lookup: bytes to move and nothing to multiply; counted as one operation a number.
    return LayerCost(
        tokens * width,
        parameter_bytes=BYTES * vocabulary * width,
        activation_bytes=4 * tokens,
        boundary_bytes=BYTES * tokens * width,
        name="embedding",
    )


def softmax(tokens, width, vocabulary):
    return LayerCost(
        2 * tokens * width * vocabulary,
        parameter_bytes=BYTES * vocabulary * width,
        activation_bytes=BYTES * tokens * (width + vocabulary),
        boundary_bytes=4,
        name="softmax",
    )


def transformer(layers, tokens, width, vocabulary):
    stack = [embedding(tokens, width, vocabulary)]
    for index in range(layers):
        stack.append(attention(f"attention{index}", tokens, width))
        stack.append(feed_forward(f"feed_forward{index}", tokens, width, 4 * width))
    return [*stack, softmax(tokens, width, vocabulary)]


def gpt3_175b():
    """Brown et al. 2020, table 2.1: 96 layers, width 12288, 2048 tokens; 50257 words."""
    return transformer(96, 2048, 12288, 50257)


def bert_large():
    """Devlin et al. 2018: 24 layers, width 1024, 512 tokens, 30522 word pieces."""
    return transformer(24, 512, 1024, 30522)


def mixture_of_experts():
    """Like GShard (Lepikhin et al. 2020): every other feed-forward layer has experts, two a token.

    36 layers, width 1024, hidden 8192, 128 experts of which one device group holds 8 here.
    """
    tokens, width, hidden = 1024, 1024, 8192
    stack = [embedding(tokens, width, 64000)]
    for index in range(36):
        stack.append(attention(f"attention{index}", tokens, width))
        if index % 2:
            stack.append(feed_forward(f"experts{index}", tokens, width, hidden, 2, experts=8))
        else:
            stack.append(feed_forward(f"feed_forward{index}", tokens, width, hidden))
    return [*stack, softmax(tokens, width, 64000)]


def convolution(size, before, after, kernel=3):
    """FLOPs and parameters of a convolution with `size` x `size` outputs."""
    return 2 * size**2 * kernel**2 * before * after, kernel**2 * before * after


def block(name, convolutions, size, channels):
    flops = sum(convolution(*shape)[0] for shape in convolutions)
    parameters = sum(convolution(*shape)[1] for shape in convolutions)
    kept = sum(shape[0] ** 2 * shape[2] for shape in convolutions)
    return LayerCost(
        flops,
        parameter_bytes=BYTES * parameters,
        activation_bytes=BYTES * kept,
        boundary_bytes=BYTES * size**2 * channels,
        name=name,
    )


def resnet152():
    """He et al. 2015, table 1: bottleneck blocks 3, 8, 36, 3 on 224 x 224 images."""
    stack = [block("stem", [(112, 3, 64, 7)], 56, 64)]
    before = 64
    for group, (count, size, inner) in enumerate(
        [(3, 56, 64), (8, 28, 128), (36, 14, 256), (3, 7, 512)]
    ):
        for index in range(count):
            parts = [(size, before, inner, 1), (size, inner, inner, 3), (size, inner, 4 * inner, 1)]
            if index == 0:
                parts.append((size, before, 4 * inner, 1))
            stack.append(block(f"group{group}_block{index}", parts, size, 4 * inner))
            before = 4 * inner
    classes = LayerCost(
        2 * 2048 * 1000,
        backward=None,
        parameter_bytes=BYTES * 2048 * 1000,
        activation_bytes=BYTES * 3048,
        boundary_bytes=BYTES * 1000,
        name="classes",
    )
    return [*stack, classes]


def unet():
    """Ronneberger et al. 2015, figure 1: five levels on 572 x 572 images.

    What a boundary carries includes the skip connections that are open there.
    """
    stack: list[LayerCost] = []
    skips = 0.0
    size, before = 572, 1

    def add(name, size, before, after, kernel=3, stride=1):
        # A transposed convolution multiplies once a number of its (smaller) input.
        part = block(name, [(size // stride, before, after, kernel)], size, after)
        stack.append(
            LayerCost(
                part.forward,
                backward=None,
                parameter_bytes=part.parameter_bytes,
                activation_bytes=part.activation_bytes,
                boundary_bytes=part.boundary_bytes + skips,
                name=name,
            )
        )

    open_skips = []
    for level, channels in enumerate([64, 128, 256, 512, 1024]):
        for index in range(2):
            size -= 2
            add(f"down{level}_{index}", size, before, channels)
            before = channels
        if level < 4:
            open_skips.append(BYTES * size**2 * channels)
            skips += open_skips[-1]
            size //= 2
    for level, channels in reversed(list(enumerate([64, 128, 256, 512]))):
        size *= 2
        add(f"grow{level}", size, before, channels, kernel=2, stride=2)
        skips -= open_skips.pop()
        for index in range(2):
            size -= 2
            add(f"up{level}_{index}", size, 2 * channels if index == 0 else channels, channels)
        before = channels
    add("classes", size, 64, 2, kernel=1)
    return stack


def amoebanet():
    """Like AmoebaNet-D (Real et al. 2018) in the size GPipe trained: 18 normal cells, 256 filters.

    A cell is five pairs of operations on one fifth of its width each; six separable 3 x 3 ones, two
    1 x 7 and 7 x 1, and products of 1 x 1 that fit the two inputs. Reduction cells halve the image
    (224, after a stem of stride 8: 28) and double the filters.
    """
    stack = [block("stem", [(112, 3, 128, 3), (56, 128, 256, 3), (28, 256, 256, 3)], 28, 256)]
    size, filters, before = 28, 256, 256
    for index in range(20):
        reduction = index in (6, 13)
        if reduction:
            size, filters = size // 2, filters * 2
        # 1 x 1 products in front of both inputs and inside of the separable operations.
        parts = [(size, before, filters, 1), (size, before, filters, 1)]
        parts += [(size, filters, filters, 1)] * (8 if reduction else 6)
        # Depthwise 3 x 3: as many products as one channel in, `filters` out.
        parts += [(size, 1, filters, 3)] * 6
        outputs = filters * 4
        stack.append(block(f"cell{index}", parts, size, outputs))
        before = outputs
    classes = LayerCost(
        2 * before * 1000,
        backward=None,
        parameter_bytes=BYTES * before * 1000,
        activation_bytes=0,
        boundary_bytes=2000,
        name="classes",
    )
    return [*stack, classes]


STACKS = {
    "GPT-3 175B": (gpt3_175b, 16),
    "BERT-large": (bert_large, 8),
    "mixture of experts": (mixture_of_experts, 16),
    "ResNet-152": (resnet152, 8),
    "U-Net": (unet, 5),
    "AmoebaNet-like": (amoebanet, 8),
}
