"""Matrix products of float32 on CPU, by oneDNN.

torch multiplies float32 matrices by MKL, which on CPUs of other makers than Intel has kernels for AVX2
only: with AVX-512 oneDNN, which torch brings along as well, is 1.8 to 2.3 times as fast there (an AMD EPYC,
1,296 rows); on Intel's own it has not been measured. torch has no switch for that; its compiler calls the
same operator.

oneDNN compiles a kernel for every shape and keeps it, 0.3 to 1.5 MiB each, so shapes must be few:
`batches.bucketed_length` sees to that, and small products, whose shapes are many, stay with MKL.
"""

import torch
from torch import Tensor

HAS_ONEDNN: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # torch's
MIN_ROWS = 64
"""In each of the three dimensions; fewer are left to torch."""


def matmul(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right`` without gradient, by whatever is fastest.

    Args:
        left: [..., M, K]. right: [K, N], of the same dtype on the same device; both of any strides.

    Returns:
        [..., M, N], contiguous where oneDNN made it.
    """
    if not _suits(left, right):
        return torch.matmul(left, right)
    rows = left.reshape(-1, left.shape[-1])
    product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, right.t(), None, "none", [], "")
    return product.view(*left.shape[:-1], right.shape[1])


def _suits(left: Tensor, right: Tensor) -> bool:
    is_float = left.dtype is torch.float32 and right.dtype is torch.float32
    if not is_float or left.device.type != "cpu" or right.dim() != 2 or left.dim() < 2:
        return False
    num_rows = left.numel() // max(left.shape[-1], 1)
    return min(num_rows, *right.shape) >= MIN_ROWS and HAS_ONEDNN
