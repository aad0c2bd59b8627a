import pytest

C = {}


def t(name):
    def d(src):
        C[name] = src

    return d


CASES = {
    "hooks": """
x=torch.ones(3).cuda().requires_grad_(); seen=[]
x.register_hook(lambda g: seen.append(g.device.type))
y=x*2
y.register_hook(lambda g: seen.append((g.device.type, type(g).__name__)))
y.sum().backward()
assert seen==[('cuda','Tensor'),'cuda'] or seen==['cuda',('cuda','Tensor')],seen
assert x.grad.device.type=='cuda'
""",
    "post_accumulate": """
p=torch.nn.Parameter(torch.ones(3).cuda()); seen=[]
p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.device.type))
(p*2).sum().backward(); assert seen==['cuda']
""",
    "module_hooks": """
m=torch.nn.Sequential(torch.nn.Linear(3,3),torch.nn.ReLU()).cuda(); seen=[]
m[0].register_full_backward_hook(lambda m,gi,go: seen.append(go[0].device.type))
m[0].register_forward_hook(lambda m,a,o: seen.append(o.device.type))
m(torch.ones(2,3).cuda().requires_grad_()).sum().backward(); assert seen==['cuda','cuda'],seen
""",
    "autograd_function": """
class F(torch.autograd.Function):
    @staticmethod
    def forward(ctx,x,w): ctx.save_for_backward(x,w); assert x.is_cuda; return x*w
    @staticmethod
    def backward(ctx,g):
        x,w=ctx.saved_tensors
        assert g.is_cuda and x.is_cuda and w.is_cuda, (g.is_cuda,x.is_cuda,w.is_cuda)
        z=torch.zeros(3,device=g.device); assert z.is_cuda
        return g*w+z, g*x
x=torch.ones(3).cuda().requires_grad_(); w=torch.nn.Parameter(torch.full((3,),2.).cuda())
y=F.apply(x,w); assert y.is_cuda
y.sum().backward(); assert x.grad.is_cuda and w.grad.tolist()==[1,1,1]
""",
    "checkpoint": """
import torch.utils.checkpoint as cp
l=torch.nn.Linear(3,3).cuda()
def f(x):
    assert x.is_cuda; y=l(x); assert y.is_cuda; return y+torch.zeros(3,device=y.device)
x=torch.ones(2,3).cuda().requires_grad_()
for r in (True,False):
    y=cp.checkpoint(f,x,use_reentrant=r); assert y.is_cuda; y.sum().backward(); assert x.grad.is_cuda
""",
    "autograd_grad": """
x=torch.ones(3,requires_grad=True); y=x.cuda()*2
g,=torch.autograd.grad(y.sum(),[x]); assert type(g) is torch.Tensor and g.device.type=='cpu'
z=torch.ones(3).cuda().requires_grad_()
g,=torch.autograd.grad((z*3).sum(),[z]); assert g.is_cuda
g,=torch.autograd.grad((z**3).sum(),[z],create_graph=True); h,=torch.autograd.grad(g.sum(),z); assert h.is_cuda and h.tolist()==[6,6,6]
""",
    "cpu_leaf": """
x=torch.ones(3,requires_grad=True); (x.cuda()*2).sum().backward(); assert type(x.grad) is torch.Tensor and not x.grad.is_cuda
""",
    "clip_opt": """
for foreach in (None,True):
    m=torch.nn.Linear(3,3).cuda(); o=torch.optim.Adam(m.parameters(),foreach=foreach)
    for _ in range(2):
        o.zero_grad(); m(torch.ones(2,3,device='cuda')).sum().backward(); n=torch.nn.utils.clip_grad_norm_(m.parameters(),1.); assert n.is_cuda; o.step()
    s=o.state_dict(); o.load_state_dict(s)
    assert m.weight.grad.is_cuda and list(o.state.values())[0]['exp_avg'].is_cuda
for c in (torch.optim.SGD,torch.optim.AdamW,torch.optim.Adagrad,torch.optim.LBFGS):
    m=torch.nn.Linear(3,3).cuda(); o=c(m.parameters(),lr=.1)
    def closure():
        o.zero_grad(); l=m(torch.ones(2,3,device='cuda')).pow(2).sum(); l.backward(); return l
    a=closure(); o.step(closure); assert closure()!=a,c
m=torch.nn.Linear(3,3).cuda(); o=torch.optim.Adam(m.parameters(),fused=True); m(torch.ones(2,3,device='cuda')).sum().backward(); o.step()
""",
    "func": """
import warnings; warnings.simplefilter('ignore')
m=torch.nn.Linear(3,2).cuda(); p=dict(m.named_parameters()); x=torch.ones(4,3).cuda()
assert torch.func.functional_call(m,p,(x,)).is_cuda
g=torch.func.grad(lambda p: torch.func.functional_call(m,p,(x,)).sum())(p); assert g['weight'].is_cuda
def f(a): 
    assert a.is_cuda; return a*2+torch.ones(3,device=a.device)
y=torch.vmap(f)(x); assert y.is_cuda and y.tolist()==[[3.]*3]*4
j=torch.func.jacrev(lambda a:a*a)(x[0]); assert j.is_cuda
j=torch.func.jacfwd(lambda a:a*a)(x[0]); assert j.is_cuda
h=torch.func.hessian(lambda a:(a**3).sum())(x[0]); assert h.is_cuda
_,v=torch.func.vjp(lambda a:a*2,x); assert v(x)[0].is_cuda
o,t=torch.func.jvp(lambda a:a*2,(x,),(x,)); assert o.is_cuda and t.is_cuda
v=torch.autograd.functional.jacobian(lambda a:a*a,x[0]); assert v.is_cuda
pe=torch.vmap(torch.func.grad(lambda p,a: torch.func.functional_call(m,p,(a,)).sum()),in_dims=(None,0))(p,x); assert pe['bias'].is_cuda
""",
    "jit": """
import warnings; warnings.simplefilter('ignore')
class N(torch.nn.Module):
    def __init__(s): super().__init__(); s.l=torch.nn.Linear(3,3); s.register_buffer('b',torch.zeros(3))
    def forward(s,x):
        if x.sum()>0: return s.l(x),{'a':x+s.b}
        return x,{'a':x}
m=torch.jit.script(N()).cuda(); assert all(p.is_cuda for p in m.parameters()); assert m.b.is_cuda
y,d=m(torch.ones(2,3).cuda()); assert y.is_cuda and d['a'].is_cuda
m2=torch.jit.trace(torch.nn.Linear(3,3).cuda(),torch.ones(2,3).cuda()); assert m2(torch.ones(2,3).cuda()).is_cuda
@torch.jit.script
def f(x): return x*2
assert f(torch.ones(3).cuda()).is_cuda and not f(torch.ones(3)).is_cuda
import io
b=io.BytesIO(); torch.jit.save(m,b); b.seek(0); m3=torch.jit.load(b,map_location='cuda'); assert m3(torch.ones(2,3).cuda())[0].is_cuda and next(m3.parameters()).is_cuda
b.seek(0); m4=torch.jit.load(b); m4.eval(); m4=torch.jit.freeze(m4); m4(torch.ones(2,3).cuda())
m.cpu(); assert not m(torch.ones(2,3))[0].is_cuda
assert not next(m.parameters()).is_cuda
""",
    "save_load": """
import io,pickle,copy
x=torch.arange(4.).cuda(); m=torch.nn.Linear(2,2).cuda()
b=io.BytesIO(); torch.save({'x':x,'v':x[1:],'m':m.state_dict(),'p':m.weight},b)
data=b.getvalue(); assert b'torch_shim' not in data and b'Cuda' not in data
b.seek(0); o=torch.load(b,weights_only=True); assert o['x'].is_cuda and o['m']['weight'].is_cuda and isinstance(o['p'],torch.nn.Parameter) and o['p'].is_cuda
o['x'][1]=9; assert o['v'][0]==9
for ml,cu in (('cpu',0),('cuda',1),(torch.device('cuda:0'),1),(lambda s,l: s,None),({'cuda:0':'cpu'},0),({'cpu':'cuda'},1)):
    b.seek(0); o=torch.load(b,map_location=ml)
    if cu is not None: assert o['x'].is_cuda==bool(cu),ml
b.seek(0); o=torch.load(b,map_location=lambda s,l: s.cuda()); assert o['x'].is_cuda
b=io.BytesIO(); torch.save(torch.ones(2),b); b.seek(0); assert torch.load(b,map_location='cuda').is_cuda; b.seek(0); assert type(torch.load(b)) is torch.Tensor
try: b.seek(0); torch.load(b,map_location='cuda:1'); assert 0
except RuntimeError: pass
b=io.BytesIO(); torch.save(x,b,_use_new_zipfile_serialization=False); b.seek(0); assert torch.load(b).is_cuda
s=pickle.dumps(x); assert b'torch_shim' not in s; assert pickle.loads(s).is_cuda
s=pickle.dumps(m); assert b'torch_shim' not in s; assert pickle.loads(s).weight.is_cuda and type(pickle.loads(s).weight).__name__=='Parameter'
b=io.BytesIO(); torch.save(m,b); assert b'torch_shim' not in b.getvalue(); b.seek(0); assert torch.load(b,weights_only=False).weight.is_cuda
assert copy.copy(x).is_cuda
import numpy
try: numpy.asarray(x); assert 0
except TypeError: pass
""",
    "deepcopy": """
import copy
m=torch.nn.Linear(2,2).cuda(); m.weight.foo=3; n=copy.deepcopy(m); assert n.weight.is_cuda and n.weight is not m.weight and isinstance(n.weight,torch.nn.Parameter) and n.weight.foo==3
x=torch.arange(4.).cuda(); l=copy.deepcopy([x,x[1:]]); l[0][1]=7; assert l[1][0]==7 and x[1]==1 and l[0].is_cuda
y=torch.ones(2).cuda().requires_grad_(); (y*2).sum().backward(); z=copy.deepcopy(y); assert z.requires_grad and z.grad.is_cuda
""",
    "storage": """
x=torch.arange(4.).cuda(); s=x.untyped_storage(); assert s.device.type=='cuda' and s.is_cuda
assert x.storage().device.type=='cuda' if True else 0
y=torch.empty(0,device='cuda').set_(s,0,(4,)); assert y.is_cuda; y[0]=5; assert x[0]==5
assert s.cpu().device.type=='cpu' and s.clone().device.type=='cuda'
assert x.data_ptr()==s.data_ptr()
assert torch.zeros(2).untyped_storage().device.type=='cpu'
""".replace(
        "assert x.storage().device.type=='cuda' if True else 0",
        "import warnings\nwith warnings.catch_warnings():\n    warnings.simplefilter('ignore'); assert x.storage().device.type=='cuda' and x.storage().is_cuda",
    ),
    "rng": """
torch.cuda.manual_seed(3); a=torch.randn(4,device='cuda'); torch.cuda.manual_seed_all(3); b=torch.randn(4,device='cuda'); assert a.equal(b)
torch.manual_seed(1); c=torch.randn(3); d=torch.randn(3,device='cuda'); torch.manual_seed(1); e=torch.randn(3,device='cuda'); f=torch.randn(3); assert c.equal(e.cpu())
g=torch.Generator(device='cuda').manual_seed(4); assert isinstance(g,torch.Generator) and g.device.type=='cuda'
a=torch.randn(4,device='cuda',generator=g); g.manual_seed(4); assert a.equal(torch.randn(4,device='cuda',generator=g))
x=torch.ones(1000).cuda(); torch.cuda.manual_seed(2); a=torch.nn.functional.dropout(x); torch.cuda.manual_seed(2); assert a.equal(torch.nn.functional.dropout(x))
s=torch.cuda.get_rng_state(); a=torch.rand_like(x); torch.cuda.set_rng_state(s); assert a.equal(torch.rand_like(x))
with torch.random.fork_rng(): torch.cuda.manual_seed(0); torch.randn(5,device='cuda')
s=torch.cuda.get_rng_state(); 
with torch.random.fork_rng(devices=[0]): torch.randn(5,device='cuda')
assert s.equal(torch.cuda.get_rng_state())
assert x.clone().uniform_(generator=g).is_cuda and torch.randint(0,5,(3,),device='cuda').is_cuda and torch.randperm(4,device='cuda').is_cuda
assert torch.bernoulli(x*.5).is_cuda and torch.multinomial(x,3).is_cuda and torch.normal(0.,1.,(2,),device='cuda').is_cuda
torch.nn.init.xavier_uniform_(torch.empty(3,3,device='cuda'))
""",
    "oom": """
try: torch.empty(9<<30,dtype=torch.uint8,device='cuda'); assert 0
except torch.cuda.OutOfMemoryError as e: assert 'CUDA out of memory' in str(e)
try: torch.empty(1<<50,device='cuda'); assert 0
except torch.cuda.OutOfMemoryError as e: pass
l=[]
try:
    for _ in range(20): l.append(torch.empty(1<<30,dtype=torch.uint8,device='cuda'))
    assert 0
except torch.OutOfMemoryError: assert len(l)==8,len(l)
assert torch.cuda.memory_allocated()==8<<30 and torch.cuda.mem_get_info()==(0,8<<30)
del l; assert torch.cuda.memory_allocated()==0 and torch.cuda.max_memory_allocated()==8<<30; torch.cuda.reset_peak_memory_stats(); assert torch.cuda.max_memory_allocated()==0
torch.cuda.memory_summary(); torch.cuda.memory_stats(); torch.cuda.memory_reserved(); torch.cuda.empty_cache()
""",
    "cuda": """
c=torch.cuda
assert c.is_available() and c.device_count()==1 and c.current_device()==0; c.set_device(0); c.set_device('cuda'); c.synchronize(); c.init()
with c.device(0): pass
with torch.cuda.device(torch.ones(2).cuda().device): pass
with c.device_of(torch.ones(2).cuda()): pass
assert c.get_device_name() and c.get_device_properties(0).total_memory==8<<30 and c.get_device_capability()==(8,0)
for bad in (lambda: c.set_device(1), lambda: c.get_device_properties(1), lambda: torch.ones(2).to('cuda:1'), lambda: torch.ones(2,device='cuda:1'), lambda: torch.ones(2).cuda(1)):
    try: bad(); assert 0
    except RuntimeError: pass
s=c.Stream(); e=c.Event(enable_timing=True); f=c.Event(enable_timing=True)
with c.stream(s): assert c.current_stream() is s; e.record(); f.record(s)
c.current_stream().wait_stream(s); s.synchronize(); f.synchronize(); assert e.elapsed_time(f)>=0 and e.query() and c.current_stream() is c.default_stream()
torch.ones(2).cuda().record_stream(s)
for bad in (lambda: c.CUDAGraph(), lambda: c.graph(None), lambda: c.make_graphed_callables(None,()), lambda: c.ExternalStream(3), lambda: c.nccl.all_reduce([]), lambda: c.cudart()):
    try: bad(); assert 0
    except RuntimeError as e: assert 'gpufaas' in str(e), e
c.nvtx.range_push('a'); c.nvtx.range_pop()
with c.nvtx.range('x'): pass
assert c.is_bf16_supported() and c.is_initialized()
a=torch.accelerator; assert a.is_available() and a.device_count()==1 and str(a.current_accelerator())=='cuda'; a.synchronize(); a.set_device_index(0); assert a.current_device_index()==0
assert torch.backends.cuda.is_built(); torch.backends.cudnn.benchmark=True; torch.backends.cudnn.deterministic; torch.backends.cuda.matmul.allow_tf32=True; torch.backends.cudnn.is_available(); torch.backends.cudnn.version()
torch.set_float32_matmul_precision('high')
x=c.FloatTensor([1,2]); assert x.is_cuda and isinstance(x,c.FloatTensor) and not isinstance(torch.ones(2),c.FloatTensor) and c.LongTensor(2,3).dtype==torch.int64
assert torch.ones(2).type('torch.cuda.FloatTensor').is_cuda and torch.ones(2).type(c.HalfTensor).dtype==torch.half and not x.type('torch.FloatTensor').is_cuda and x.type()=='torch.cuda.FloatTensor' and not x.type(torch.DoubleTensor).is_cuda and x.type(torch.float64).is_cuda
from torch.nn.attention import sdpa_kernel, SDPBackend
with sdpa_kernel(SDPBackend.MATH): torch.nn.functional.scaled_dot_product_attention(*[torch.ones(1,2,4,8,device='cuda')]*3)
torch.cuda.get_arch_list(); torch.cuda.mem_get_info(0)
assert torch.get_device_module('cuda') is torch.cuda
""",
    "default_device": """
torch.set_default_device('cuda'); assert torch.ones(2).is_cuda and torch.get_default_device()==torch.device('cuda',0), torch.get_default_device()
m=torch.nn.Linear(2,2); assert m.weight.is_cuda and m(torch.ones(1,2)).is_cuda; assert torch.tensor([1]).is_cuda and torch.randn(2).is_cuda and not torch.ones(2,device='cpu').is_cuda
assert not torch.from_numpy(__import__('numpy').ones(2)).is_cuda
torch.set_default_device(None); assert not torch.ones(2).is_cuda
with torch.device('cuda:0'): assert torch.zeros(2).is_cuda
import warnings; warnings.simplefilter('ignore')
torch.set_default_tensor_type('torch.cuda.FloatTensor'); assert torch.ones(1).is_cuda; torch.set_default_tensor_type(torch.FloatTensor); assert not torch.ones(1).is_cuda
with torch.device('meta'): m=torch.nn.Linear(2,2)
assert m.weight.is_meta
m=m.to_empty(device='cuda'); assert m.weight.is_cuda
with torch.device('meta'): m=torch.nn.Linear(2,2)
try: m.cuda(); assert 0
except NotImplementedError: pass
""",
    "modules": """
import warnings
m=torch.nn.Sequential(torch.nn.Linear(2,2),torch.nn.BatchNorm1d(2)); w=m[0].weight; ids=[id(p) for p in m.parameters()]
assert m.cuda() is m and m[0].weight is w and w.is_cuda and isinstance(w,torch.nn.Parameter) and m[1].running_mean.is_cuda and type(w).__name__=='Parameter'
m(torch.ones(3,2).cuda()).sum().backward(); assert w.grad.is_cuda
m.cpu(); assert type(w) is torch.nn.Parameter and type(w.grad) is torch.Tensor and not m[1].running_mean.is_cuda and m[0].weight is w
m.to('cuda',torch.float16); assert w.is_cuda and w.dtype==torch.half; m.float(); m.double(); m.to(torch.bfloat16); assert w.is_cuda
l=torch.nn.Linear(2,2); e=torch.nn.Linear(2,2); e.weight=l.weight; n=torch.nn.ModuleList([l,e]).cuda(); assert n[0].weight is n[1].weight and len(list(n.parameters()))==3
for c in (torch.nn.LSTM,torch.nn.GRU,torch.nn.RNN):
    r=c(2,3,num_layers=2,bidirectional=True,batch_first=True).cuda(); o,h=r(torch.ones(4,5,2).cuda()); assert o.is_cuda; r.flatten_parameters()
    P=torch.nn.utils.rnn.pack_padded_sequence(torch.ones(4,5,2).cuda(),torch.tensor([5,4,3,1]),batch_first=True); assert P.data.is_cuda and not P.batch_sizes.is_cuda
    o,h=r(P); q,l=torch.nn.utils.rnn.pad_packed_sequence(o,batch_first=True); assert q.is_cuda and not l.is_cuda
    P=torch.nn.utils.rnn.pack_padded_sequence(torch.ones(4,5,2).cuda(),[1,2,5,3],batch_first=True,enforce_sorted=False); assert P.sorted_indices.is_cuda; o,h=r(P); torch.nn.utils.rnn.pad_packed_sequence(o)
    assert P.cpu().data.device.type=='cpu' and P.to('cuda').data.is_cuda
r=torch.nn.LSTMCell(2,3).cuda(); assert r(torch.ones(1,2).cuda())[0].is_cuda
l=torch.nn.LazyLinear(3).cuda(); y=l(torch.ones(2,4).cuda()); assert y.is_cuda and l.weight.is_cuda and type(l.weight).__name__=='Parameter', type(l.weight)
import torch.nn.utils.parametrizations as P
for f in (P.weight_norm,P.spectral_norm,P.orthogonal):
    m=f(torch.nn.Linear(3,3)).cuda(); assert m(torch.ones(2,3).cuda()).is_cuda; m.weight
    m=f(torch.nn.Linear(3,3).cuda()); assert m(torch.ones(2,3).cuda()).is_cuda
warnings.simplefilter('ignore')
m=torch.nn.utils.weight_norm(torch.nn.Linear(3,3)).cuda(); assert m(torch.ones(2,3).cuda()).is_cuda
m=torch.nn.utils.spectral_norm(torch.nn.Linear(3,3)).cuda(); assert m(torch.ones(2,3).cuda()).is_cuda
m=torch.nn.DataParallel(torch.nn.Linear(3,3).cuda()); assert m(torch.ones(2,3)).is_cuda and m(torch.ones(2,3).cuda()).is_cuda
m=torch.nn.Linear(2,2); m.load_state_dict({k:v.cuda() for k,v in m.state_dict().items()}); assert not m.weight.is_cuda
m.load_state_dict({k:v.cuda() for k,v in m.state_dict().items()},assign=True); assert m.weight.is_cuda and isinstance(m.weight,torch.nn.Parameter)
torch.__future__.set_overwrite_module_params_on_conversion(True); m=torch.nn.Linear(2,2).cuda(); assert m.weight.is_cuda; m.cpu(); assert not m.weight.is_cuda; torch.__future__.set_overwrite_module_params_on_conversion(False)
torch.__future__.set_swap_module_params_on_conversion(True); m=torch.nn.Linear(2,2); w=m.weight; m.cuda(); assert m.weight is w and w.is_cuda and isinstance(w,torch.nn.Parameter),type(w); m.cpu(); assert not w.is_cuda; m.load_state_dict({k:v.cuda() for k,v in m.state_dict().items()})
torch.__future__.set_swap_module_params_on_conversion(False)
m=torch.nn.MultiheadAttention(4,2,batch_first=True).cuda().eval(); x=torch.ones(2,3,4).cuda(); assert m(x,x,x)[0].is_cuda
m=torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(4,2,8,batch_first=True),2).cuda().eval()
with torch.no_grad(): assert m(x,src_key_padding_mask=torch.zeros(2,3,dtype=torch.bool,device='cuda')).is_cuda
assert torch.nn.Embedding(3,4,device='cuda')(torch.tensor([1],device='cuda')).is_cuda
class B(torch.nn.Module):
    def __init__(s): super().__init__(); s.register_buffer('b',torch.ones(2,device='cuda')); s.p=torch.nn.ParameterList([torch.nn.Parameter(torch.ones(2))])
assert B().cuda().p[0].is_cuda and B().cpu().b.device.type=='cpu'
""",
    "autocast": """
h=torch.ones(4,4).cuda()
with torch.autocast('cuda'): 
    assert (h@h).dtype==torch.float16 and torch.is_autocast_enabled() and torch.get_autocast_dtype('cuda')==torch.float16
    with torch.autocast('cuda',enabled=False): assert (h@h).dtype==torch.float32 and not torch.is_autocast_enabled()
    with torch.autocast('cuda',dtype=torch.bfloat16): assert (h@h).dtype==torch.bfloat16
    assert (h@h).dtype==torch.float16
    assert torch.nn.functional.softmax((h@h),-1).dtype==torch.float32, 'softmax'
    assert torch.nn.functional.layer_norm((h@h),(4,)).dtype==torch.float32
    assert (h@h).exp().dtype==torch.float32 and (h@h).sum().dtype==torch.float32
    
assert (h@h).dtype==torch.float32 and not torch.is_autocast_enabled() and not torch.is_autocast_enabled('cpu')
@torch.autocast('cuda',dtype=torch.bfloat16)
def f(): return h@h
assert f().dtype==torch.bfloat16
import warnings
with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    with torch.cuda.amp.autocast(): assert (h@h).dtype==torch.half
    torch.cuda.amp.GradScaler()
m=torch.nn.Linear(4,4).cuda(); o=torch.optim.SGD(m.parameters(),.1); s=torch.amp.GradScaler('cuda',init_scale=8.)
with torch.autocast('cuda',dtype=torch.bfloat16): l=m(h).sum()
s.scale(l).backward(); s.unscale_(o); s.step(o); s.update(); assert s.get_scale()==8.
with torch.autocast('cpu',dtype=torch.bfloat16):
    with torch.autocast('cuda'): pass
    assert torch.is_autocast_enabled('cpu') and torch.get_autocast_dtype('cpu')==torch.bfloat16
class F(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type='cuda',cast_inputs=torch.float32)
    def forward(ctx,x): assert x.dtype==torch.float32; return x*2
    @staticmethod
    @torch.amp.custom_bwd(device_type='cuda')
    def backward(ctx,g): return g*2
with torch.autocast('cuda'): assert F.apply(h.half().requires_grad_()).dtype==torch.float32
""",
    "mixed": """
h=torch.ones(4).cuda(); c=torch.ones(4)
for f in (lambda: h+c, lambda: c+h, lambda: torch.add(h,c), lambda: torch.cat([h,c]), lambda: torch.stack([c,h]), lambda: h.add_(c), lambda: torch.where(h>0,h,c), lambda: torch.nn.functional.linear(h,torch.ones(4,4)), lambda: torch.nn.functional.embedding(torch.tensor([1]),torch.ones(3,3).cuda()), lambda: torch.equal(h,c), lambda: torch.add(h,h,out=c), lambda: c.set_(h), lambda: torch.nn.Linear(4,4)(h), lambda: h.index_select(0,torch.tensor([1])), lambda: h.masked_fill(torch.tensor([True]*4),0.), lambda: torch.einsum('i,i->',h,c), lambda: h.scatter_(0,torch.tensor([1]),h)):
    try: f()
    except RuntimeError as e: assert 'device' in str(e), e
    else: raise AssertionError(f.__code__.co_consts, f.__code__.co_names)
s=torch.tensor(2.); assert (h*s).is_cuda and (s*h).is_cuda and torch.where(h>0,h,s).is_cuda
assert h[torch.tensor([1])].is_cuda and h[c>0].is_cuda; h[torch.tensor([0])]=1.; h[0]=torch.tensor(3.); h[:2]=torch.ones(2); h.copy_(c); c.copy_(h); assert type(c) is torch.Tensor
h.index_put_((torch.tensor([1]),),torch.tensor(1.).cuda())
assert type(c[h>0]) is torch.Tensor or True
""",
    "misc": """
x=torch.arange(6.).reshape(2,3).cuda()
for r in torch.return_types.max.__mro__ and [x.max(1)]: assert r.values.is_cuda and r.indices.is_cuda
assert all(t.is_cuda for t in x) and all(t.is_cuda for t in x.split(1)) and x.unbind()[0].is_cuda
assert repr(x).endswith("device='cuda:0')") and repr(x).startswith('tensor(') and f'{x.sum():.1f}'=='15.0' and str(x[0,0])=="tensor(0., device='cuda:0')"
assert repr(torch.nn.Parameter(x[0])).replace(chr(10),' ')=="Parameter containing: tensor([0., 1., 2.], device='cuda:0', requires_grad=True)", repr(torch.nn.Parameter(x[0]))
assert x.unique(return_counts=True)[1].is_cuda and torch.svd(x)[0].is_cuda and torch.linalg.qr(x)[0].is_cuda and x.new(2).is_cuda and x.new_tensor([1]).is_cuda
assert torch.as_tensor(x) is x and not torch.as_tensor(x,device='cpu').is_cuda and torch.as_tensor(torch.ones(2),device='cuda').is_cuda and torch.asarray(x).is_cuda
import warnings
with warnings.catch_warnings(): warnings.simplefilter('ignore'); assert torch.tensor(x).is_cuda and not torch.tensor(x,device='cpu').is_cuda
assert torch.tensor([x[0,0],x[0,1]]).device.type=='cpu'
y=torch.empty(2,3,device='cuda'); assert torch.add(x,x,out=y) is y
z=torch.zeros(2,3); z.data=x; assert z.is_cuda and z.data_ptr()==x.data_ptr()
z=torch.nn.Parameter(torch.zeros(2,3)); z.data=x; assert z.is_cuda and isinstance(z,torch.nn.Parameter)
a=torch.nn.Parameter(torch.zeros(2)); b=torch.nn.Parameter(torch.ones(2).cuda()); torch.utils.swap_tensors(a,b); assert a.is_cuda and not b.is_cuda
import numpy as np
for f in (lambda: x.numpy(), lambda: np.array(x), lambda: np.asarray(x), lambda: np.sin(x)):
    try: f(); assert 0
    except TypeError as e: pass
assert x.cpu().numpy().sum()==15 and x.numpy(force=True).sum()==15
c=torch.ones(2); d=c.to('cuda'); d.add_(1); assert c.tolist()==[1,1]; e=d.cpu(); e.zero_(); assert d.tolist()==[2,2]; assert d.to('cuda') is d and d.cuda() is d and c.to('cpu') is c and c.cpu() is c
assert d.to(torch.half).is_cuda and d.to(c).device.type=='cpu' and c.to(d).is_cuda and d.to('cpu',torch.half).dtype==torch.half and d.to(0) is d and c.to(0).is_cuda and d.to(device='cuda',dtype=torch.half,non_blocking=True).is_cuda and d.to('cuda',copy=True) is not d
assert d.to('meta').is_meta and not d.to('meta').is_cuda
assert c.pin_memory().is_pinned() and not c.is_pinned(); p=c.pin_memory(); assert p.pin_memory() is p and p.to('cuda',non_blocking=True).is_cuda
torch.testing.assert_close(x,x+0)
try: torch.testing.assert_close(x,x.cpu()); assert 0
except AssertionError: pass
assert torch.equal(x,x) and torch.allclose(x,x) and x.tolist() and x.sum().item()==15. and len(x)==2 and 3. in x
warnings.simplefilter('ignore'); i=torch.sparse_coo_tensor(torch.tensor([[0,1],[1,0]]),[1.,2.],device='cuda'); assert i.is_cuda and i.to_dense().is_cuda and (i@torch.ones(2,2).cuda()).is_cuda and i.coalesce().values().is_cuda
assert torch.zeros(2).to_sparse().cuda().is_cuda
import collections
assert hash(x) is not None and x in {x} and {x:1}[x]==1 if False else True
assert not hasattr(x,'__cuda_array_interface__')
assert torch.from_dlpack(x).is_cuda
q=torch.utils.data.default_collate([x,x]); assert q.is_cuda
assert isinstance(x,torch.Tensor) and torch.is_tensor(x) and torch.is_floating_point(x)
assert x.device.index==0 and x.get_device()==0 and x.is_cuda and not x.is_cpu and x.device==torch.device('cuda:0') and x.device.type=='cuda'
assert torch.stft(torch.ones(400).cuda(),100,return_complex=True).is_cuda and torch.fft.fft(x).is_cuda
assert x.share_memory_() is x and x.is_shared()
assert torch.broadcast_tensors(x,x[0])[1].is_cuda and torch.meshgrid(x[0],x[0],indexing='ij')[0].is_cuda and torch.atleast_1d(x[0]).is_cuda
assert torch.hann_window(4,device='cuda').is_cuda and torch.linspace(0,1,3,device='cuda').is_cuda and torch.eye(2,device='cuda').is_cuda and torch.tril_indices(2,2,device='cuda').is_cuda
assert x.__class__ and torch.utils._pytree.tree_map(lambda t:t+1,{'a':[x]})['a'][0].is_cuda
assert torch.ops.aten.add(x,x).is_cuda and torch.ops.aten.add.Tensor(x,x).is_cuda
with torch.inference_mode(): assert (x+1).is_cuda and torch.zeros(2,device='cuda').is_inference()
assert torch.compile is not None
""",
    "epochs": """
from torch_shim import storages
from torch_shim.storages import mark_of, marked
def changed(f,*ts):
    ms=[marked(t) for t in ts]; e=[m.epoch for m in ms]; w=storages.writes; f(); assert storages.writes!=w,(f.__code__.co_names,f.__code__.co_consts); assert all(m.epoch!=a for m,a in zip(ms,e)),(f.__code__.co_names,f.__code__.co_consts)
def same(f,*ts):
    ms=[marked(t) for t in ts]; e=[m.epoch for m in ms]; w=storages.writes; f(); assert storages.writes==w; assert all(m.epoch==a for m,a in zip(ms,e))
x=torch.ones(2,2).cuda(); assert mark_of(x) is None; m=marked(x); assert mark_of(x[0]) is m and mark_of(x.data) is m and mark_of(x.detach()) is m
F=torch.nn.functional
class Q: pass
q=Q(); q.y=x
def iadd(): q.y+=1
for f in (lambda: x.add_(1), lambda: x.data.mul_(2), lambda: x.__setitem__(0,1.), iadd, lambda: x[0].zero_(), lambda: x.copy_(torch.ones(2,2)), lambda: torch.add(x,1,out=x), lambda: torch._foreach_add_([x],1), lambda: F.relu(x,inplace=True), lambda: torch.relu_(x), lambda: torch.nn.init.zeros_(x), lambda: torch.nn.init.normal_(x), lambda: x.fill_diagonal_(0), lambda: x.T.zero_(), lambda: x.untyped_storage().fill_(0), lambda: x.index_put_((torch.tensor([0]),),torch.tensor(1.)), lambda: torch.ops.aten.add_.Tensor(x,x), lambda: torch.ops.aten.add_(x,x), lambda: F.dropout(x,inplace=True), lambda: torch.nn.ReLU(inplace=True)(x), lambda: x.real.zero_(), lambda: torch.clamp_(x,0,1), lambda: x.normal_(), lambda: x.detach().numpy if 0 else x.detach().zero_(), lambda: torch.add(x,x,out=x), lambda: x.masked_fill_(x>0,1.), lambda: F.silu(x.data,inplace=True), lambda: torch.sum(torch.ones(3,2).cuda(),0,out=x[0])): changed(f,x)
for f in (lambda: x+x, lambda: x.sum().item(), lambda: x.requires_grad_(), lambda: x.detach(), lambda: x.to('cpu'), lambda: F.relu(x), lambda: x.data, lambda: x.shape, lambda: x.cpu(), lambda: x.untyped_storage(), lambda: x.data_ptr()): same(f,x)
x=torch.ones(2,2).cuda()
b=torch.nn.BatchNorm1d(2).cuda(); changed(lambda: b(x), b.running_mean, b.running_var, b.num_batches_tracked); b.eval(); same(lambda: b.running_mean.sum(), b.running_mean)
p=torch.nn.Linear(2,2).cuda()
for foreach in (False,True):
    o=torch.optim.SGD(p.parameters(),.1,foreach=foreach); p(x).sum().backward(); changed(o.step,p.weight,p.bias)
o=torch.optim.Adam(p.parameters(),fused=True); changed(o.step,p.weight,p.bias)
w=storages.writes; p.weight.data=torch.zeros(2,2).cuda(); assert storages.writes!=w
w=storages.writes; p.load_state_dict(p.state_dict()); assert storages.writes!=w
changed(lambda: torch.nn.utils.vector_to_parameters(torch.zeros(6).cuda(),p.parameters()) ) 
e=torch.nn.Embedding(3,2,max_norm=.1).cuda(); changed(lambda: e(torch.tensor([1]).cuda()),e.weight)
""",
    "dataloader": """
ds=torch.utils.data.TensorDataset(torch.arange(8.))
for n in (0,1):
    for x, in torch.utils.data.DataLoader(ds,batch_size=4,pin_memory=True,num_workers=n): assert x.to('cuda',non_blocking=True).is_cuda and x.is_pinned() 
""",
    "multiprocessing": """
import torch.multiprocessing as mp
def f(q,r):
    x=q.get(timeout=8); assert x.is_cuda; x.add_(1); r.put((x.sum().item(),torch.ones(2).cuda())); r.get() if 0 else None
    q.get(timeout=8)
c=mp.get_context('fork'); q=c.Queue(); r=c.Queue(); p=c.Process(target=f,args=(q,r)); p.start(); x=torch.ones(3).cuda(); q.put(x); s,y=r.get(timeout=8); assert s==6 and y.is_cuda and y.tolist()==[1,1]; q.put(1); p.join(); assert p.exitcode==0
""",
    "subclass": """
class S(torch.Tensor): pass
s=torch.ones(2).as_subclass(S); t=s.to('cuda'); assert t.is_cuda and isinstance(t,S)
assert type(t.cpu()) is S
class P(torch.nn.Parameter): pass
""",
    "threads": """
import threading
x=torch.ones(3).cuda(); out=[]
def f():
    y=x+1; out.append(y.is_cuda and torch.zeros(2,device='cuda').is_cuda)
ts=[threading.Thread(target=f) for _ in range(4)]
[t.start() for t in ts]; [t.join() for t in ts]; assert out==[True]*4
""",
}


@pytest.mark.parametrize("name", CASES)
def test_case(shim, name):
    shim(CASES[name])
