"""The CUDA sources of the layer pipeline; ``kernel_source`` reads them."""
