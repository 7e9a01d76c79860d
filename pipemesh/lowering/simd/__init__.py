"""SIMD: every core runs the same program, with its slices and its core number as inputs."""
