"""Attention written by hand at random is found, shown and changed as by hand.

A program is drawn from independent choices: letters of einsums, transposes, reshapes
and split heads, grouped and single key heads, masks, ways to write a softmax, and what
is around. float64 NumPy says what the program is to show and to return.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku.core import sites
from tests import everyday

B, S, H, G, K, V, D = 2, 5, 4, 2, 3, 6, 7

CHOICES = {
    "length": (3, 8, 1),  # of the queries; H divides 8
    "projection": ("einsum", "reshape", "sizes_first", "split", "sliced"),
    "product": ("einsum", "matmul", "batched", "stacked", "vmap"),
    "key_heads": ("all", "grouped", "repeated", "one", "one_axis", "one_grouped"),
    "scale": ("query", "scores", "none"),
    "mask": ("none", "where", "bias", "weights", "renormalized", "added"),
    "softmax": ("jax", "twice", "shifted", "logsumexp", "inverse"),
    "output": ("einsum", "reshape", "sizes_first", "split", "summed", "untransposed"),
    "around": ("nothing", "jit", "remat", "scan", "vmap", "jit_of_parts"),
}

# Axes of products that are not einsums of drawn letters.
_FIXED = {"q": "bhtk", "k": "bhsk", "v": "bhsv", "w": "bhts", "o": "bhtv"}
_STACKED = {"q": "hbtk", "k": "hbsk", "v": "hbsv", "w": "hbts", "o": "hbtv"}


def drawn(rng):
    """Draws one of each choice, of those that go together."""
    chosen = {name: rng.choice(values) for name, values in CHOICES.items()}
    if chosen["product"] != "einsum" and chosen["key_heads"] != "repeated":
        chosen["key_heads"] = "all"
    if chosen["around"] == "vmap" and chosen["product"] in ("batched", "stacked"):
        chosen["around"] = "jit"
    return chosen | {"length": int(chosen["length"])}


class Program:
    """Layers of attention, in JAX as somebody might write them, and by hand."""

    def __init__(self, seed, lengths=None):
        rng = np.random.default_rng(seed)
        self.__dict__.update(drawn(rng))
        self.length, num_keys = lengths or (self.length, S)
        self.is_scan = self.around == "scan"
        # Heads of queries are [g, r] where r of them share a key head of an axis.
        of_keys = {"all": (H, "h"), "grouped": (G, "g"), "repeated": (G, "h")}
        of_keys |= {"one": (1, ""), "one_axis": (1, "u"), "one_grouped": (1, "g")}
        self.num_key_heads, self.key_head = of_keys[self.key_heads]
        self.head = "gr" if self.key_head == "g" else "h"
        letters = {
            "q": f"bt{self.head}k",
            "k": f"bs{self.key_head}k",
            "v": f"bs{self.key_head}v",
            "w": f"b{self.head}ts",
            "o": f"bt{self.head}v",
        }
        self.axes = {"matmul": _FIXED, "vmap": _FIXED, "batched": _FIXED}.get(
            self.product, _STACKED
        )
        if self.product == "einsum":
            self.axes = {
                name: "".join(rng.permutation(list(each)))
                for name, each in letters.items()
            }
        self.letters = letters
        sizes = {"query": (H, K), "output": (H, V)}
        sizes |= {"key": (self.num_key_heads, K), "value": (self.num_key_heads, V)}
        layers = 2 if self.is_scan else 1
        draw = functools.partial(rng.normal, scale=0.5)
        self.params = {
            name: draw(size=(layers, D, *size)).astype(np.float32)
            for name, size in sizes.items()
        }
        x, y = (
            draw(size=(B, n, D)).astype(np.float32) for n in (self.length, num_keys)
        )
        self.arguments = self.params, x, x if self.is_scan else y
        shape = self.length, self.arguments[2].shape[1]
        self.allowed = rng.random(shape) < 0.6
        self.allowed[:, 0] = True
        self.bias = draw(size=(H, *shape)).astype(np.float32)
        self.constant = abs(draw(size=(H, 1, 1))).astype(np.float32)

    def __call__(self, params, x, y):
        if self.is_scan:

            def step(x, params):
                return x + self.layer(params, x, x), None

            return jax.lax.scan(step, x, params)[0]
        params = {name: each[0] for name, each in params.items()}
        layer = {"jit": jax.jit, "remat": jax.checkpoint}.get(self.around, lambda f: f)
        if self.around == "vmap":
            one = functools.partial(self.layer, params)
            return jax.vmap(lambda x, y: one(x[None], y[None])[0])(x, y)
        return layer(self.layer)(params, x, y)

    def layer(self, params, x, y):
        project, soften, axes = self.projected, self.softened, self.axes
        if self.around == "jit_of_parts":
            project = jax.jit(project, static_argnums=(2,))
            soften = jax.jit(soften)
        q = project(x, params["query"], "q")
        k, v = project(y, params["key"], "k"), project(y, params["value"], "v")
        if self.key_heads == "repeated":
            k = jnp.repeat(k, H // G, axis=axes["k"].index("h"))
            v = jnp.repeat(v, H // G, axis=axes["v"].index("h"))
        if self.scale == "query":
            q = q * K**-0.5
        if self.product == "einsum":
            scores = jnp.einsum(f"{axes['q']},{axes['k']}->{axes['w']}", q, k)
            product = f"{axes['w']},{axes['v']}->{axes['o']}"
            o = jnp.einsum(product, soften(scores), v)
        elif self.product == "matmul":
            o = soften(q @ jnp.swapaxes(k, -1, -2)) @ v
        elif self.product == "vmap":
            scores = jax.vmap(jax.vmap(lambda q, k: q @ k.T))(q, k)
            o = jax.vmap(jax.vmap(jnp.matmul))(soften(scores), v)
        else:
            shape = q.shape[:2]
            q, k, v = (z.reshape(-1, *z.shape[2:]) for z in (q, k, v))
            scores = q @ jnp.swapaxes(k, 1, 2)
            weights = soften(scores.reshape(*shape, *scores.shape[1:]))
            o = weights.reshape(scores.shape) @ v
            o = o.reshape(*shape, *o.shape[1:])
        return self.merged(o, params["output"])

    def projected(self, x, kernel, name):
        """Projects `[b, t, d]`, and splits the result into heads."""
        letters, axes = self.letters[name], self.axes[name]
        head, heads, size = letters[2:-1], *kernel.shape[1:]
        split = (heads,) if len(head) == 1 else (heads // (H // self.num_key_heads), -1)
        split = split if head else ()
        before = letters.replace(head, "")
        if self.projection == "einsum":
            kernel = kernel.reshape(D, *split, size)
            parts = f"{letters[:2]}d,d{head}{letters[-1]}->{axes}"
            return jnp.einsum(parts, x, kernel)
        if self.projection == "sizes_first" and head:
            flat = jnp.swapaxes(kernel, 1, 2).reshape(D, -1)
            whole = (x @ flat).reshape(*x.shape[:2], size, *split)
            return jnp.einsum(f"{before}{head}->{axes}", whole)
        whole = x @ kernel.reshape(D, -1)
        if self.projection == "reshape" or head != "h":
            whole = whole.reshape(*x.shape[:2], *split, size)
            return jnp.einsum(f"{letters}->{axes}", whole)
        if self.projection == "split":
            parts = jnp.split(whole, heads, -1)
        else:
            parts = [whole[..., i * size : (i + 1) * size] for i in range(heads)]
        order = [before.index(letter) for letter in axes.replace("h", "")]
        parts = [jnp.transpose(part, order) for part in parts]
        return jnp.stack(parts, axes.index("h"))

    def softened(self, scores):
        """Scales, masks and normalizes scores."""
        axes = self.axes["w"]
        keys = axes.index("s")
        sums = functools.partial(jnp.sum, axis=keys, keepdims=True)

        def fitted(x):  # `[h, t, s]` in the axes of the scores
            x = jnp.asarray(x)
            if self.head == "gr":
                x = x.reshape(-1, min(len(x), H // self.num_key_heads), *x.shape[1:])
            order = [f"{self.head}ts".index(letter) for letter in axes if letter != "b"]
            return jnp.expand_dims(jnp.transpose(x, order), axes.index("b"))

        allowed = fitted(self.allowed[None])
        if self.scale == "scores":
            scores = scores * K**-0.5
        if self.mask == "where":
            scores = jnp.where(allowed, scores, -1e30)
        if self.mask == "bias":
            scores = scores + fitted(self.bias)
        if self.softmax == "jax":
            weights = jax.nn.softmax(scores, axis=keys)
        elif self.softmax == "twice":
            weights = jnp.exp(scores) / sums(jnp.exp(scores))
        elif self.softmax == "shifted":
            weights = jnp.exp(scores - scores.max(keys, keepdims=True))
            weights = weights / sums(weights)
        elif self.softmax == "inverse":
            weights = jnp.exp(scores) * (1 / sums(jnp.exp(scores)))
        else:
            total = jax.scipy.special.logsumexp(scores, keys, keepdims=True)
            weights = jnp.exp(scores - total)
        if self.mask in ("weights", "renormalized"):
            weights = weights * allowed
        if self.mask == "renormalized":
            weights = weights / sums(weights)
        return weights + fitted(self.constant) if self.mask == "added" else weights

    def merged(self, o, kernel):
        """Projects heads of the axes `o` to `[b, t, d]`; the kernel is `[d, h, v]`."""
        axes, head = self.axes["o"], self.head
        kernel = jnp.moveaxis(kernel, 0, -1)
        split = (self.num_key_heads, -1) if head == "gr" else (H,)
        whole = kernel.reshape(*split, V, D)
        if self.output == "untransposed":
            o = jnp.einsum(f"{axes}->b{head}tv", o)
            return o.reshape(len(o), -1, H * V) @ kernel.reshape(-1, D)
        if self.output == "summed":
            each = jnp.einsum(f"{axes},{head}vd->{head}btd", o, whole)
            return each.sum(tuple(range(len(head))))
        if self.output == "einsum":
            return jnp.einsum(f"{axes},{head}vd->btd", o, whole)
        if self.output == "sizes_first":
            o = jnp.einsum(f"{axes}->btv{head}", o)
            kernel = jnp.swapaxes(kernel, 0, 1)
        elif self.output == "split" and head == "h":
            o = jnp.concatenate([*jnp.einsum(f"{axes}->hbtv", o)], -1)
        else:
            o = jnp.einsum(f"{axes}->bt{head}v", o)
        return o.reshape(*o.shape[:2], -1) @ kernel.reshape(-1, D)

    def expected(self, change_weights=lambda w: w, change_heads=lambda h: h):
        """Computes the output, and the sites of layers; changes are of the first."""
        params, x, y = jax.tree.map(np.float64, self.arguments)
        repeated = functools.partial(np.repeat, repeats=H // self.num_key_heads, axis=2)
        found = []
        for i, output in enumerate(params["output"]):
            y = x if self.is_scan else y
            q, k, v = (
                np.einsum("btd,dhk->bthk", each, params[name][i])
                for each, name in ((x, "query"), (y, "key"), (y, "value"))
            )
            scale = 1 if self.scale == "none" else K**-0.5
            scores = np.einsum("bthk,bshk->bhts", q * scale, repeated(k))
            scores = scores + (self.bias if self.mask == "bias" else 0)
            masses = np.exp(scores)
            if self.mask in ("where", "renormalized"):
                masses = masses * self.allowed
            weights = masses / masses.sum(-1, keepdims=True)
            weights = weights * (self.allowed if self.mask == "weights" else 1)
            weights = weights + (self.constant if self.mask == "added" else 0)
            weights = weights if i else change_weights(weights)
            heads = np.einsum("bhts,bshv->bthv", weights, repeated(v))
            heads = heads if i else change_heads(heads)
            q = q * scale if self.scale == "query" else q
            names = ("query", "key", "weights", "value", "heads")
            found.append(dict(zip(names, (q, k, weights, v, heads), strict=True)))
            if self.output == "untransposed":
                merged = np.swapaxes(heads, 1, 2).reshape(B, -1, H, V)
            else:
                merged = heads
            added = np.einsum("bthv,dhv->btd", merged, output)
            x = x + added if self.is_scan else added
        return x, found


def _without_first_key(weights):
    is_kept = np.arange(weights.shape[-1]) > 0
    return weights * is_kept.reshape((1,) * (weights.ndim - 1) + (-1,))


def _without_second_head(heads):
    return heads * (np.arange(H) != 1).reshape((1,) * (heads.ndim - 2) + (-1, 1))


# Programs in which each choice is made at least once, and more that are slow.
_COVERING = (0, 2, 35, 74, 87, 133, 171, 179)


@pytest.mark.parametrize(
    "seed",
    everyday.some([*_COVERING, *range(200, 208)], 4),
)
def test_attention_at_random_is_shown_and_edited_as_by_hand(seed):
    program = Program(seed)
    name = "0/attention_0" if program.is_scan else "attention_0"

    @jax.jit
    def run(*arguments):
        heads = {f"{name}/heads": _without_second_head}
        weights = {f"{name}/weights": _without_first_key}
        return (
            sites.look(program, ["*"])(*arguments),
            sites.edit(program, heads)(*arguments),
            sites.edit(program, weights)(*arguments),
        )

    (output, found), ablated, reweighted = run(*program.arguments)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    wanted, layers = program.expected()
    close(output, wanted)
    close(ablated, program.expected(change_heads=_without_second_head)[0])
    close(reweighted, program.expected(_without_first_key)[0])
    assert len(found) == 6 * len(layers)
    for i, layer in enumerate(layers):
        place = f"{i}{name[1:]}" if program.is_scan else name
        shown = {facet: found[f"{place}/{facet}"] for facet in (*layer, "map")}
        for facet, value in layer.items():
            # Under vmap the batch is [B, 1], or [B].
            seen = shown[facet].reshape(B, *shown[facet].shape[1 - value.ndim :])
            if facet in ("key", "value") and seen.shape[2] == H:
                value = np.repeat(value, H // value.shape[2], 2)
            assert seen.shape == value.shape
            close(seen, value, err_msg=facet)
        weights = shown["map"].weights().reshape(layer["weights"].shape)
        close(weights, layer["weights"])
        are_shares = np.isclose(layer["weights"].sum(-1), 1).all()
        assert (shown["map"].rows_sum_to == "1") == are_shares
