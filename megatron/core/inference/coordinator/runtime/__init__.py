"""Everything that touches sockets, processes, clocks, torch.distributed or HTTP."""
