"""One stage's passes of one micro-batch: forward, and backward whole or in two.

The split follows Qi et al. 2023, "Zero Bubble Pipeline Parallelism": the input gradient goes to the stage before at
once, the weight gradients are computed later. Autograd computes of each node only what is asked for, so the two halves
together are one backward pass: the first runs from the output to the input and notes the gradient that arrives at each
node with weights; the second runs from each of these nodes to its weights alone. Weight gradients reach their
parameters through autograd's accumulation, so that hooks fire as after any backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from raybench.errors import RequestError

Gradients = tuple[Tensor | None, ...]


class Pass:
    """A stage's forward pass of one micro-batch, kept for its backward.

    Args:
        entry: the leaf from which the stage computes, whose gradient goes to the stage before; None on the first.
        output: what it computed; only its place in autograd's graph is kept.
    """

    def __init__(self, entry: Tensor | None, output: Tensor) -> None:
        self.entry = entry
        self._root = get_gradient_edge(output)

    def backward(self, gradient: Tensor) -> Tensor | None:
        """Add the weight gradients to the parameters; the gradient of the entry, if there is one."""
        torch.autograd.backward([self._root], [gradient])
        return None if self.entry is None else self.entry.grad


class SplitPass:
    """As `Pass`, with its backward in two halves.

    Args:
        forward: computes the output anew from the entry, for a stage that keeps nothing (recomputation).
        embedded: on the first stage, what the embedding gave, of which `entry` is the detached copy.
    """

    def __init__(
        self,
        entry: Tensor,
        output: Tensor | None,
        *,
        forward: Callable[[], Tensor] | None = None,
        embedded: Tensor | None = None,
    ) -> None:
        self.entry = entry
        self._root = None if output is None else get_gradient_edge(output)
        self._forward = forward
        self._embedded = embedded
        self._weights: list[_Weights] = []
        self._entry_gradient: Tensor | None = None

    def input_gradient(self, gradient: Tensor) -> Tensor:
        """The gradient of the entry; what the weight gradients need is kept."""
        if self._root is None:
            assert self._forward is not None
            self._root = get_gradient_edge(self._forward())
        root, self._root = self._root, None
        self._weights = find_weights(root.node, get_gradient_edge(self.entry).node)
        edges = [edge for weights in self._weights for edge in weights.asked_edges()]
        hooks = [weights.catch() for weights in self._weights]
        found = torch.autograd.grad(
            [root],
            [get_gradient_edge(self.entry), *edges],
            [gradient],
            retain_graph=True,
        )
        for remove in hooks:
            remove()
        rest = iter(found[1:])
        for weights in self._weights:
            weights.take(rest)
        self._entry_gradient = found[0] if self._embedded is not None else None
        # Python's part of a node does not keep the graph alive, which the root does.
        self._root = root if any(weights.in_python for weights in self._weights) else None
        return found[0]

    def weight_gradient(self) -> None:
        """Add the weight gradients to the parameters, last layer first."""
        for weights in self._weights:
            weights.accumulate()
        self._weights.clear()
        self._root = None
        if self._embedded is not None and self._embedded.requires_grad:
            torch.autograd.backward([self._embedded], [self._entry_gradient])
        self._embedded = self._entry_gradient = None


@dataclass
class _Weights:
    """A node on the way from output to input, and the weights of which it computes the gradients.

    Its own arriving gradient is caught, and the node asked once more for the weights' part. A node in Python computes
    all that it can when it is asked: there the gradients it leaves on its edges towards the weights are caught.
    """

    node: Node
    edges: list[GradientEdge]
    """To what lies between it and its weights."""
    parameters: list[nn.Parameter]
    _arrived: list[Gradients] = field(default_factory=list)
    _roots: list[GradientEdge] = field(default_factory=list)
    _gradients: list[Tensor] = field(default_factory=list)

    @property
    def in_python(self) -> bool:
        return isinstance(self.node, torch._C._FunctionBase)

    def asked_edges(self) -> list[GradientEdge]:
        return self.edges if self.in_python else []

    def catch(self) -> Callable[[], None]:
        """Note the gradient that arrives at the node; what is returned ends that."""
        if self.in_python:
            return lambda: None
        # The hook knows no node: a node that holds a hook that holds the node would outlive its use.
        handle = self.node.register_prehook(self._arrived.append)
        return handle.remove

    def take(self, found: Iterator[Tensor]) -> None:
        """Take what was caught, or the gradients of `asked_edges` from all that were found."""
        if self.in_python:
            self._roots, self._gradients = self.edges, [next(found) for _ in self.edges]
            return
        known = [(place, gradient) for place, gradient in enumerate(self._arrived.pop()) if gradient is not None]
        self._roots = [GradientEdge(self.node, place) for place, _ in known]
        self._gradients = [gradient for _, gradient in known]

    def accumulate(self) -> None:
        torch.autograd.backward(
            self._roots,
            self._gradients,
            inputs=self.parameters,
        )


def find_weights(root: Node, entry: Node) -> list[_Weights]:
    """Every node on a way from `root` to `entry` that also leads to parameters by edges off that way, root first.

    Raises:
        RequestError: a parameter is used by two such nodes, so that one's gradient would pass through the other.
    """
    on_way = _leading_to(root, entry)
    found: list[_Weights] = []
    users: dict[nn.Parameter, int] = {}
    for node in _from(root, on_way):
        edges = [GradientEdge(child, nr) for child, nr in node.next_functions if child is not None]
        edges = [edge for edge in edges if edge.node not in on_way]
        parameters = list(dict.fromkeys(p for edge in edges for p in _parameters(edge.node)))
        if parameters:
            found.append(_Weights(node, edges, parameters))
        for parameter in parameters:
            users[parameter] = users.get(parameter, 0) + 1
            if users[parameter] > 1:
                raise RequestError(
                    f"a parameter of shape {list(parameter.shape)} is used twice in one stage, and its weight gradient "
                    "cannot be computed apart (allowed: a schedule that does not split backward, such as one-f-one-b)"
                )
    return found


def _leading_to(root: Node, entry: Node) -> set[Node]:
    """The nodes under `root` from which `entry` can be reached, `entry` included."""
    leads: dict[Node, bool] = {entry: True}
    stack = [root]
    while stack:
        node = stack[-1]
        children = [child for child, _ in node.next_functions if child is not None]
        unknown = [child for child in children if child not in leads]
        if node in leads:
            stack.pop()
        elif unknown:
            stack.extend(unknown)
        else:
            leads[node] = any(leads[child] for child in children)
            stack.pop()
    return {node for node, does in leads.items() if does}


def _from(root: Node, nodes: set[Node]) -> Iterator[Node]:
    """`nodes` in an order in which each stands before those that it leads to."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(root, False)]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            order.append(node)
        elif node in nodes and node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((child, False) for child, _ in node.next_functions if child is not None)
    return reversed(order)


def _parameters(node: Node) -> Iterator[nn.Parameter]:
    """The leaves under a node."""
    seen: set[Node] = set()
    stack = [node]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf: Any = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf
        stack.extend(child for child, _ in node.next_functions if child is not None)


def leaf(hidden: Tensor) -> Tensor:
    """A leaf of autograd's graph with the content of `hidden`, from which a stage begins."""
    return hidden.detach().requires_grad_()
