"""Float32 matrix products on CPU with oneDNN.

torch multiplies float32 matrices with MKL, which has only AVX2 kernels on CPUs of other makers than Intel.
oneDNN is part of torch too; with AVX-512 it is 1.8 to 2.3 times as fast there (an AMD EPYC, 1,296 rows). On
Intel CPUs this was not measured. torch has no switch for it; its compiler calls the same operator.

oneDNN compiles a kernel for every shape and keeps it, 0.3 to 1.5 MiB each, so shapes must be few.
`batches.bucketed_length` limits them. Small products, which have many shapes, stay with MKL.
"""

import torch
from torch import Tensor

HAS_ONEDNN: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # torch's
MIN_ROWS = 64
"""Minimum of each of the three dimensions M, K, N; torch computes smaller products."""


def fast_matmul(left: Tensor, right: Tensor) -> Tensor:
    """Computes ``left @ right`` without gradient, with the faster library.

    Args:
        left: [..., M, K]. right: [K, N], of the same dtype on the same device; both of any strides.

    Returns:
        [..., M, N], contiguous if oneDNN computed it.
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
