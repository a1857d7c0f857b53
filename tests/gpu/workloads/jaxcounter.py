"""JAX: a jitted step whose input is donated. Unsigned 32-bit words wrap by themselves, so the rule holds without a mask."""

import contract
import jax
import numpy as np
from jax import numpy as jnp


def main() -> None:
    options = contract.parser().parse_args()
    if jax.default_backend() != "gpu":
        raise SystemExit(f"JAX has no GPU here: {jax.devices()}")
    constant = jax.random.normal(jax.random.key(0), (int(options.gib * (1 << 28)),), dtype=jnp.float32)
    words = jnp.arange(contract.WORDS, dtype=jnp.uint32)

    def following(x):
        x = x * jnp.uint32(contract.A) + jnp.uint32(contract.C)
        return x, jnp.sum(x, dtype=jnp.uint32)

    advance = jax.jit(following, donate_argnums=0)

    def step(_number: int) -> int:
        nonlocal words
        words, total = advance(words)
        return int(total)

    def digest() -> str:
        # A fresh copy each time: an array keeps the host's copy that it was once asked for.
        return contract.sha256(np.ascontiguousarray(np.asarray(constant + jnp.float32(0))).view("u1"))

    contract.run(contract.Log(options.log, contract.WORDS), step, digest)


if __name__ == "__main__":
    main()
