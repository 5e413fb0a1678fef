"""A TIRx kernel whose CTAs take tiles from TIRx's scheduler on clusterlaunchcontrol."""

from tvm.backend.cuda.lang.tile_scheduler import ClusterLaunchControlScheduler
from tvm.script import tirx as T


def count_tiles(rows: int, columns: int):
    """Adds 1 to every tile it visits, and notes which CTAs have started in `ran`."""

    @T.prim_func
    def count(tiles: T.Buffer((rows, columns), "int32"), ran: T.Buffer((rows * columns,), "int32")):
        T.device_entry()
        cluster = T.cluster_id([rows * columns])
        rank = T.cta_id_in_cluster([1])
        wg = T.warpgroup_id([2])
        w = T.warp_id_in_wg([4])
        lane = T.lane_id([32])
        t = T.thread_id([256])
        tg = T.thread_id_in_wg([128])
        pool = T.SMEMPool()
        scheduler = ClusterLaunchControlScheduler(pool, rows, columns, 2, cta_group=1, finish_arrivals=2)
        pool.commit()
        worker = scheduler.worker("worker")
        T.cuda.cta_sync()
        if t == 0:
            ran[cluster] = 1
        if wg == 1:
            if w == 0:
                scheduler.run_scheduler(rank)
        else:
            worker.init(cluster)
            while worker.valid():
                if tg == 0:
                    tiles[worker.m_idx, worker.n_idx] = tiles[worker.m_idx, worker.n_idx] + 1
                worker.consume_wg(wg, w, lane)
                worker.advance_coords()
                worker.mark_done_if_drained()
        T.cuda.cta_sync()

    return count
