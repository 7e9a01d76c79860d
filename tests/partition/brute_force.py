"""The definition of the best partition, written out: every contiguous cut, in exact fractions.

Nothing here uses the code under test. A cut's key is its bottleneck, then the sum of squared
device times, then (virtual stages) the sum of squared stage times; `None` if it is not allowed.
"""

import itertools
from fractions import Fraction


def number(value):
    """A float as the decimal that a person would write, if it is short, else its exact value."""
    text = Fraction(repr(float(value)))
    return text if text.denominator <= 10**6 else Fraction(float(value))


def flights(schedule, microbatches, stages):
    if schedule == "gpipe" or schedule == "looped_bfs":
        return [microbatches] * stages
    if schedule == "zb_h1":
        return [min(microbatches, stages)] * stages
    return [min(microbatches, stages - stage) for stage in range(stages)]


def spared(options, stage, stages, devices):
    """The share of microbatches whose forward pass `except_last` does not run again."""
    if options.get("at_once") is not None:
        return Fraction(options["at_once"][stage], options["num_microbatches"])
    microbatches = options.get("num_microbatches")
    if options.get("schedule") in ("gpipe", "looped_bfs"):
        ends_here = stage >= stages - devices
        return Fraction(1, microbatches) if ends_here and microbatches else Fraction(0)
    turns = stage >= stages - devices if microbatches == 1 else stage == stages - 1
    return Fraction(int(turns))


def bytes_of(layers, begin, end, held, remat, optimizer):
    """Bytes of a stage with so many microbatches in flight."""
    inside = layers[begin:end]
    kept = sum(number(layer.activation_bytes) for layer in inside)
    # What two layers of a stage share is kept once.
    kept -= sum(number(layer.shared_bytes) for layer in inside[1:])
    if remat == "none":
        kept *= held
    elif begin:
        kept += held * number(layers[begin - 1].boundary_bytes)
    return (1 + number(optimizer)) * sum(number(layer.parameter_bytes) for layer in inside) + kept


def key_of(cut, layers, options, in_flight=None):
    stages = len(cut) - 1
    rounds = options.get("num_virtual_stages", 1)
    homes = options.get("stage_devices") or [s % (stages // rounds) for s in range(stages)]
    devices = max(homes) + 1
    speeds = [number(v) for v in options.get("speeds") or [1] * devices]
    bandwidth = options.get("bandwidth")
    remat = options.get("remat", "none")
    schedule = options.get("schedule", "one_f_one_b")
    microbatches = options.get("num_microbatches")
    in_flight = options.get("in_flight", in_flight)
    if in_flight is None and microbatches is not None:
        in_flight = flights(schedule, microbatches, stages)
    times, memory = [], [0] * devices
    for stage, (begin, end) in enumerate(itertools.pairwise(cut)):
        if end - begin < options.get("min_layers", 1):
            return None
        if options.get("max_layers") is not None and end - begin > options["max_layers"]:
            return None
        again = Fraction(0) if remat == "none" else Fraction(1)
        if remat == "except_last":
            again = 1 - spared(options, stage, stages, devices)
        compute = (
            sum(
                number(layer.forward) * (1 + again) + number(layer.backward)
                for layer in layers[begin:end]
            )
            / speeds[homes[stage]]
        )
        crossing = Fraction(0)
        if bandwidth is not None and devices > 1:
            if begin > 0 and homes[stage - 1] != homes[stage]:
                crossing += number(layers[begin - 1].boundary_bytes) / number(bandwidth)
            if end < len(layers) and homes[stage] != homes[stage + 1]:
                crossing += number(layers[end - 1].boundary_bytes) / number(bandwidth)
        if options.get("overlap_transfers"):
            times.append(max(compute, crossing))
        else:
            times.append(compute + crossing)
        if options.get("memory_limit") is not None:
            optimizer = options.get("optimizer_bytes_per_parameter_byte", 2.0)
            held = in_flight[stage]
            memory[homes[stage]] += bytes_of(layers, begin, end, held, remat, optimizer)
    if options.get("memory_limit") is not None and max(memory) > number(options["memory_limit"]):
        return None
    for group in options.get("same_stage", ()):
        if any(min(group) < place <= max(group) for place in cut):
            return None
    fixed = options.get("fixed", ())
    if isinstance(fixed, dict):
        if any(cut[stage] != layer for stage, layer in fixed.items()):
            return None
    elif not set(fixed) <= set(cut):
        return None
    sums = [sum(t for t, d in zip(times, homes, strict=True) if d == n) for n in range(devices)]
    key = (max(sums), sum(total * total for total in sums))
    return (*key, sum(time * time for time in times)) if devices < stages else key


def best_key(layers, num_stages, options, in_flight=None):
    best = None
    for inner in itertools.combinations(range(1, len(layers)), num_stages - 1):
        key = key_of((0, *inner, len(layers)), layers, options, in_flight)
        if key is not None and (best is None or key < best):
            best = key
    return best
