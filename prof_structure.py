import sys; sys.path.insert(0,'benchmarks')
import torch, device_structure as d, gossamer as gs
from torch.profiler import profile, ProfilerActivity
for name in ("documents_131072","chosen_40768_h16","decoding_32_8192"):
    case=d.CASES[name](); x=[torch.randn(s,device='cuda',dtype=torch.bfloat16,requires_grad=case.gradients) for s in case.shapes]
    dout=torch.randn(case.shapes[0],device='cuda',dtype=torch.bfloat16) if case.gradients else None
    g,_=d.captured(lambda: d.step(x,dout,case.options)); g.replay(); torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as pr:
        g.replay(); torch.cuda.synchronize()
    ev=[e for e in pr.events() if e.device_type.name=='CUDA']
    print(name,len(ev),"kernels",sum(e.device_time for e in ev),"us")
    t=pr.key_averages().table(sort_by="device_time_total",row_limit=22,max_name_column_width=90)
    print("\n".join(l[:92]+l[-75:] for l in t.splitlines()))
