package comm

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"strings"
	"sync"
	"unsafe"

	"ulysses/internal/clock"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// suite is what every communicator must do. Each function runs on all ranks at once and returns what was wrong on its rank.
var suite = []struct {
	name string
	run  func(c Comm) error
}{
	{"Barrier", func(c Comm) error { return c.Barrier() }},
	{"AllToAllUneven", suiteAllToAll},
	{"AllToAllEmpty", suiteAllToAllEmpty},
	{"AllToAllStart", suiteStart},
	{"AllReduce", suiteAllReduce},
	{"AllReduceNaN", suiteNaN},
	{"AllGather", suiteAllGather},
	{"ReduceScatter", suiteReduceScatter},
	{"Broadcast", suiteBroadcast},
	{"SendRecv", suiteSendRecv},
	{"Split", suiteSplit},
	{"Concurrent", suiteConcurrent},
	{"Refusals", suiteRefusals},
	{"Agree", suiteAgree},
	{"Same", suiteSame},
	{"Counted", suiteCounted},
	{"Mesh", suiteMesh},
}

var allTypes = []tensor.DType{tensor.F32, tensor.BF16, tensor.F16, tensor.F64, tensor.I32, tensor.I64, tensor.U8}

func newTensor(d tensor.DType, shape ...int64) tensor.Tensor {
	n := tensor.Of(nil, d, shape...).Bytes()
	words := make([]int64, (n+7)/8)
	if n == 0 {
		return tensor.Of(nil, d, shape...)
	}
	return tensor.Of(unsafe.Pointer(&words[0]), d, shape...)
}

// wrong is errors.New with a format; tests of ranks return it.
func wrong(format string, args ...any) error { return fmt.Errorf(format, args...) }

func rowsBetween(from, to int) int64 { return int64((from*3 + to*5) % 4) } // zero for some pairs

func exchangeRows(c Comm, scale int64) (recv, send []int64) {
	for j := range c.Size() {
		send = append(send, rowsBetween(c.Rank(), j)*scale)
		recv = append(recv, rowsBetween(j, c.Rank())*scale)
	}
	return recv, send
}

// pattern is byte k of what one rank sends to another.
func pattern(from, to int, k, salt int64) byte {
	return byte(int64(from)*31 + int64(to)*7 + k*3 + k>>8 + salt)
}

func fillSend(c Comm, t tensor.Tensor, send []int64, salt int64) {
	b, row, at := t.RawBytes(), rowBytes(t), int64(0)
	for j, n := range send {
		for k := range n * row {
			b[at+k] = pattern(c.Rank(), j, k, salt)
		}
		at += n * row
	}
}

func checkRecv(c Comm, t tensor.Tensor, recv []int64, salt int64) error {
	b, row, at := t.RawBytes(), rowBytes(t), int64(0)
	for j, n := range recv {
		for k := range n * row {
			if b[at+k] != pattern(j, c.Rank(), k, salt) {
				return wrong("byte %d from rank %d of %v: %d, want %d", k, j, t, b[at+k], pattern(j, c.Rank(), k, salt))
			}
		}
		at += n * row
	}
	for ; at < int64(len(b)); at++ {
		if b[at] != 0xEE {
			return wrong("byte %d behind the rows of %v was written", at, t)
		}
	}
	return nil
}

func suiteAllToAll(c Comm) error {
	for i, d := range allTypes {
		for _, scale := range []int64{1, 3001} { // small messages, and large ones that libraries send by other ways
			recv, send := exchangeRows(c, scale)
			src, dst := newTensor(d, total(send), 2, 3), newTensor(d, total(recv)+2, 6)
			fillSend(c, src, send, int64(i))
			for k, b := 0, dst.RawBytes(); k < len(b); k++ {
				b[k] = 0xEE
			}
			if err := c.AllToAll(nil, dst, src, recv, send); err != nil {
				return err
			}
			if err := checkRecv(c, dst, recv, int64(i)); err != nil {
				return err
			}
		}
	}
	return nil
}

func suiteAllToAllEmpty(c Comm) error {
	none := make([]int64, c.Size())
	if err := c.AllToAll(nil, tensor.Tensor{}, tensor.Tensor{}, none, none); err != nil {
		return err
	}
	if err := c.AllToAll(nil, newTensor(tensor.F32, 0, 4), newTensor(tensor.F32, 0, 4), none, none); err != nil {
		return err
	}
	ones := make([]int64, c.Size())
	for i := range ones {
		ones[i] = 1
	}
	wide := newTensor(tensor.F32, int64(c.Size()), 0) // rows without elements
	if err := c.AllToAll(nil, wide, wide, ones, ones); err != nil {
		return err
	}
	// Only rank 0 has anything to send, only the last to receive.
	recv, send := make([]int64, c.Size()), make([]int64, c.Size())
	last := c.Size() - 1
	var src, dst tensor.Tensor
	if c.Rank() == 0 {
		send[last] = 2
		src = newTensor(tensor.I64, 2)
		fillSend(c, src, send, 9)
	}
	if c.Rank() == last {
		recv[0] = 2
		dst = newTensor(tensor.I64, 2)
	}
	if err := c.AllToAll(nil, dst, src, recv, send); err != nil {
		return err
	}
	if c.Rank() == last {
		return checkRecv(c, dst, recv, 9)
	}
	return nil
}

// suiteStart waits for two exchanges in an order of each rank's own, with another collective between start and wait.
func suiteStart(c Comm) error {
	return errors.Join(startTwo(c, false), startTwo(c, true))
}

func startTwo(c Comm, test bool) error {
	recv, send := exchangeRows(c, 2000)
	var requests [2]Request
	var dst [2]tensor.Tensor
	for i := range requests {
		src := newTensor(tensor.F32, total(send), 5)
		dst[i] = newTensor(tensor.F32, total(recv), 5)
		fillSend(c, src, send, int64(i))
		var err error
		if requests[i], err = c.AllToAllStart(nil, dst[i], src, recv, send); err != nil {
			return err
		}
	}
	one := tensor.OfInt32([]int32{1}, 1)
	if t, ok := requests[1].(Tester); ok && test {
		if _, err := t.Test(); err != nil {
			return err
		}
	}
	steps := []func() error{requests[1].Wait, func() error { return c.AllReduce(nil, one, Sum) }, requests[0].Wait}
	if c.Rank()%2 == 1 {
		steps[0], steps[2] = steps[2], steps[0]
	}
	if c.Rank()%3 == 2 {
		steps[0], steps[1] = steps[1], steps[0]
	}
	for _, step := range steps {
		if err := step(); err != nil {
			return err
		}
	}
	if got := one.Int32s()[0]; got != int32(c.Size()) {
		return wrong("all-reduce of ones on %d ranks: %d", c.Size(), got)
	}
	for i := range dst {
		if err := checkRecv(c, dst[i], recv, int64(i)); err != nil {
			return err
		}
	}
	if requests[0].Wait() == nil {
		return wrong("a second Wait of a request succeeded")
	}
	return nil
}

var reducedTypes = []tensor.DType{tensor.F32, tensor.F64, tensor.BF16, tensor.I32, tensor.I64}

// operand is element k of a rank's argument; the values make f32 sums depend on their order.
func operand(rank int, k int64) float64 {
	return float64((int64(rank+1)*(k+3)*7919)%20011-10000) * float64(int64(1)<<((k+int64(rank))%9))
}

func put(t tensor.Tensor, k int64, v float64) {
	switch t.DType {
	case tensor.F32:
		t.Float32s()[k] = float32(v / 3)
	case tensor.F64:
		t.Float64s()[k] = v / 3
	case tensor.BF16:
		view[uint16](t.Data, k, 1)[0] = tensor.F32ToBF16(float32(v / 3))
	case tensor.I32:
		t.Int32s()[k] = int32(v)
	case tensor.I64:
		t.Int64s()[k] = int64(v)
	}
}

func newOperand(d tensor.DType, rank int, n int64) tensor.Tensor {
	t := newTensor(d, n)
	for k := range n {
		put(t, k, operand(rank, k))
	}
	return t
}

// expected combines element k of all ranks in rank order, one element at a time: what reduce must equal bit for bit. A float64 sum
// of two float32 rounds to their float32 sum, so float64 serves every float type.
func expected(d tensor.DType, op Op, size int, k int64) (bits int64) {
	var words [1]int64
	one := tensor.Of(unsafe.Pointer(&words), d, 1)
	get := func(r int) float64 {
		put(one, 0, operand(r, k))
		switch d {
		case tensor.F32:
			return float64(one.Float32s()[0])
		case tensor.F64:
			return one.Float64s()[0]
		case tensor.BF16:
			return float64(tensor.BF16ToF32(uint16(words[0])))
		}
		return math.Trunc(operand(r, k))
	}
	acc := get(0)
	for r := 1; r < size; r++ {
		switch x := get(r); op {
		case Max:
			acc = math.Max(acc, x)
		case Min:
			acc = math.Min(acc, x)
		default:
			acc += x
		}
		if d == tensor.F32 || d == tensor.BF16 {
			acc = float64(float32(acc))
		}
	}
	switch d {
	case tensor.F32:
		return int64(math.Float32bits(float32(acc)))
	case tensor.F64:
		return int64(math.Float64bits(acc))
	case tensor.BF16:
		return int64(tensor.F32ToBF16(float32(acc)))
	case tensor.I32:
		return int64(uint32(int32(acc)))
	}
	return int64(acc)
}

func checkReduced(what string, t tensor.Tensor, first int64, op Op, size int) error {
	raw, width := t.RawBytes(), t.DType.Size()
	for k := range t.Numel() {
		var got [8]byte
		copy(got[:], raw[k*width:(k+1)*width])
		if got, want := int64(binary.LittleEndian.Uint64(got[:])), expected(t.DType, op, size, first+k); got != want {
			return wrong("%s of %v, reduction %d: element %d is %x, want %x", what, t, op, k, got, want)
		}
	}
	return nil
}

func suiteAllReduce(c Comm) error {
	for _, d := range reducedTypes {
		for _, op := range []Op{Sum, Max, Min} {
			for _, n := range []int64{0, 1, 5, 2049, 33001} { // the last goes beyond smallReduce
				if n == 33001 && op == Min {
					continue
				}
				t := newOperand(d, c.Rank(), n)
				if err := c.AllReduce(nil, t, op); err != nil {
					return err
				}
				if err := checkReduced("all-reduce", t, 0, op, c.Size()); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

func suiteNaN(c Comm) error {
	for _, op := range []Op{Sum, Max, Min} {
		x := []float32{1, 2}
		if c.Rank() == c.Size()-1 {
			x[1] = float32(math.NaN())
		}
		if err := c.AllReduce(nil, tensor.OfFloat32(x, 2), op); err != nil {
			return err
		}
		if x[1] == x[1] || x[0] != x[0] {
			return wrong("reduction %d of a NaN on one rank: %v", op, x)
		}
	}
	return nil
}

func suiteAllGather(c Comm) error {
	for _, d := range allTypes {
		for _, scale := range []int64{1, 3001} {
			var rows []int64
			for j := range c.Size() {
				rows = append(rows, int64((j*2+1)%3)*scale) // ranks 1, 4, 7 have none
			}
			all := newTensor(d, total(rows), 3)
			own := all.Slice(0, before(rows, c.Rank()), before(rows, c.Rank()+1)) // in place
			if scale == 1 {
				own = newTensor(d, rows[c.Rank()], 3)
			}
			for k, b := 0, own.RawBytes(); k < len(b); k++ {
				b[k] = pattern(c.Rank(), 0, int64(k), 0)
			}
			if err := c.AllGather(nil, all, own, rows); err != nil {
				return err
			}
			at, b := int64(0), all.RawBytes()
			for j, n := range rows {
				for k := range n * rowBytes(all) {
					if got := b[at+k]; got != pattern(j, 0, k, 0) {
						return wrong("all-gather of %v: byte %d of rank %d is %d", all, k, j, got)
					}
				}
				at += n * rowBytes(all)
			}
		}
	}
	return nil
}

func suiteReduceScatter(c Comm) error {
	for _, d := range reducedTypes {
		for _, scale := range []int64{1, 5000} {
			var rows []int64
			for j := range c.Size() {
				rows = append(rows, int64((j*2+1)%3)*scale)
			}
			first := before(rows, c.Rank()) * 3
			src := newOperand(d, c.Rank(), total(rows)*3).View(total(rows), 3)
			dst := src.Slice(0, before(rows, c.Rank()), before(rows, c.Rank()+1)) // in place
			if scale == 1 {
				dst = newTensor(d, rows[c.Rank()], 3)
			}
			if err := c.ReduceScatter(nil, dst, src, rows); err != nil {
				return err
			}
			if err := checkReduced("reduce-scatter", dst.View(dst.Numel()), first, Sum, c.Size()); err != nil {
				return err
			}
		}
	}
	return nil
}

func suiteBroadcast(c Comm) error {
	for root := range c.Size() {
		for _, n := range []int64{0, 1, 100003} {
			t := newTensor(tensor.BF16, n)
			if c.Rank() == root {
				for k, b := 0, t.RawBytes(); k < len(b); k++ {
					b[k] = pattern(root, 1, int64(k), n)
				}
			}
			if err := c.Broadcast(nil, t, root); err != nil {
				return err
			}
			for k, got := range t.RawBytes() {
				if got != pattern(root, 1, int64(k), n) {
					return wrong("broadcast of %v from %d: byte %d is %d", t, root, k, got)
				}
			}
		}
		for _, text := range []string{"", "job", strings.Repeat("long", 5000)} {
			var mine []byte
			if c.Rank() == root {
				mine = []byte(text)
			}
			got, err := BroadcastBytes(c, mine, root)
			if err != nil {
				return err
			}
			if string(got) != text {
				return wrong("broadcast of %d bytes from %d: got %d bytes", len(text), root, len(got))
			}
		}
	}
	return nil
}

func suiteSendRecv(c Comm) error {
	n, r := c.Size(), c.Rank()
	for _, count := range []int64{0, 1, 50000} {
		for _, shift := range []int{1, n - 1, n} { // forward, backward, to itself
			to, from := (r+shift)%n, (r-shift+n)%n
			send, recv := newTensor(tensor.F32, count), newTensor(tensor.F32, count)
			for k, x := int64(0), send.Float32s(); k < count; k++ {
				x[k] = float32(int64(r)*100000 + k)
			}
			if err := c.SendRecv(nil, recv, from, send, to); err != nil {
				return err
			}
			for k, got := range recv.Float32s() {
				if got != float32(from*100000+k) {
					return wrong("shift %d: element %d from rank %d is %v", shift, k, from, got)
				}
			}
		}
	}
	// A line: the first receives from nobody, the last sends to nobody.
	to, from := r+1, r-1
	if to == n {
		to = -1
	}
	send, recv := tensor.OfInt32([]int32{int32(r)}, 1), tensor.OfInt32([]int32{-7}, 1)
	if err := c.SendRecv(nil, recv, from, send, to); err != nil {
		return err
	}
	if want := int32(r - 1); r > 0 && recv.Int32s()[0] != want || r == 0 && recv.Int32s()[0] != -7 {
		return wrong("line: rank %d has %d", r, recv.Int32s()[0])
	}
	return nil
}

func suiteSplit(c Comm) error {
	color := 0 // group 1: rank 0 alone; nobody: rank 2; group 0: the rest, in reverse
	if c.Rank() == 0 {
		color = 1
	}
	if c.Rank() == 2 {
		color = -1
	}
	sub, err := c.Split(color, -c.Rank())
	if err != nil {
		return err
	}
	if color < 0 {
		if sub != nil {
			return wrong("a negative color got a communicator: %v", sub)
		}
		return nil
	}
	members := []int{0}
	if color == 0 {
		members = nil
		for r := c.Size() - 1; r > 0; r-- {
			if r != 2 {
				members = append(members, r)
			}
		}
	}
	if sub.Size() != len(members) || members[sub.Rank()] != c.Rank() {
		return wrong("group %d: rank %d of %d", color, sub.Rank(), sub.Size())
	}
	if err := suiteAllToAll(sub); err != nil {
		return err
	}
	all := make([]int32, len(members))
	ones := make([]int64, len(members))
	for i := range ones {
		ones[i] = 1
	}
	if err := sub.AllGather(nil, tensor.OfInt32(all, int64(len(all))), tensor.OfInt32([]int32{int32(c.Rank())}, 1), ones); err != nil {
		return err
	}
	for i := range all {
		if int(all[i]) != members[i] {
			return wrong("group %d has %v, want %v", color, all, members)
		}
	}
	return sub.Close()
}

// suiteConcurrent uses two communicators of the same ranks from two goroutines at once.
func suiteConcurrent(c Comm) error {
	const rounds = 20
	subs := make([]Comm, 3)
	for i := range subs {
		var err error
		if subs[i], err = c.Split(0, c.Rank()); err != nil {
			return err
		}
	}
	errs := make([]error, len(subs))
	var wg sync.WaitGroup
	for i, sub := range subs {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for round := range int64(rounds) {
				recv, send := exchangeRows(sub, 1+round*40)
				src, dst := newTensor(tensor.F32, total(send), 3), newTensor(tensor.F32, total(recv), 3)
				fillSend(sub, src, send, round+int64(i))
				if errs[i] = sub.AllToAll(nil, dst, src, recv, send); errs[i] != nil {
					return
				}
				if errs[i] = checkRecv(sub, dst, recv, round+int64(i)); errs[i] != nil {
					return
				}
			}
		}()
	}
	wg.Wait()
	for _, sub := range subs {
		errs = append(errs, sub.Close())
	}
	return errors.Join(errs...)
}

// suiteRefusals makes calls that cannot be right on every rank: each is refused before it touches the others.
func suiteRefusals(c Comm) error {
	n := c.Size()
	rows := make([]int64, n)
	rows[0] = 1
	t, u := newTensor(tensor.F32, 4, 4), newTensor(tensor.F32, 4, 4)
	bad := func(i int64) []int64 { r := append([]int64(nil), rows...); r[0] = i; return r }
	device := t
	device.Where = tensor.CUDA
	lost := t
	lost.Data = nil
	for i, call := range []func() error{
		func() error { return c.AllToAll(nil, t, u, rows, append(rows, 0)) },
		func() error { return c.AllToAll(nil, t, u, bad(5), rows) },
		func() error { return c.AllToAll(nil, t, u, rows, bad(-1)) },
		func() error { return c.AllToAll(nil, t.Permute(1, 0), u, rows, rows) },
		func() error { return c.AllToAll(nil, t, t, rows, rows) },
		func() error { return c.AllToAll(nil, t, newTensor(tensor.F32, 4, 3), rows, rows) },
		func() error { return c.AllToAll(nil, t, lost, rows, rows) },
		func() error { return c.AllReduce(nil, newTensor(tensor.U8, 3), Sum) },
		func() error { return c.AllReduce(nil, t, Op(9)) },
		func() error { return c.AllReduce(nil, device, Sum) },
		func() error { return c.Broadcast(nil, t, n) },
		func() error { return c.Broadcast(nil, t, -1) },
		func() error { return c.SendRecv(nil, t, n, u, 0) },
		func() error { return c.AllGather(nil, t, u, bad(5)) },
		func() error { return c.ReduceScatter(nil, u, t, rows[1:]) },
	} {
		err := call()
		if code := status.Of(err); code != status.InvalidArgument && code != status.Unsupported {
			return wrong("call %d: %v (%v)", i, err, code)
		}
	}
	return c.Barrier()
}

func suiteAgree(c Comm) error {
	if err := Agree(c, nil); err != nil {
		return err
	}
	bad := c.Size() - 1
	cause := errors.New("disk full")
	var mine error
	if c.Rank() == bad {
		mine = status.Errorf(status.IO, "checkpoint: %w", cause)
	}
	err := Agree(c, mine)
	if want := fmt.Sprintf("rank %d: checkpoint: disk full", bad); err == nil || err.Error() != want || status.Of(err) != status.IO {
		return wrong("agree: %v (%v), want %q", err, status.Of(err), want)
	}
	if c.Rank() == bad && !errors.Is(err, cause) {
		return wrong("agree lost the cause on the failing rank")
	}
	err = Agree(c, status.Errorf(status.Code(1+c.Rank()%4), "step: fault %d", c.Rank()))
	want := fmt.Sprintf("rank %d: step: fault %d", c.Rank(), c.Rank())
	if c.Size() > 1 {
		want += fmt.Sprintf(" (%d of %d ranks failed)", c.Size(), c.Size())
	}
	if err == nil || err.Error() != want || status.Of(err) != status.InvalidArgument {
		return wrong("agree: %v (%v), want %q", err, status.Of(err), want)
	}
	return nil
}

func suiteSame(c Comm) error {
	if err := Same(c, "plan", Field{"heads", "8"}, Field{"", ""}, Field{"length", "4096"}); err != nil {
		return err
	}
	bad := c.Size() - 1
	length := "4096"
	if c.Rank() == bad {
		length = "4097"
	}
	err := Same(c, "plan", Field{"heads", "8"}, Field{"length", length})
	if c.Size() == 1 {
		return err
	}
	want := fmt.Sprintf("plan: length is 4097 on rank %d and 4096 on rank 0: it must be the same on all ranks", bad)
	if err == nil || err.Error() != want || status.Of(err) != status.InvalidArgument {
		return wrong("same: %v, want %q", err, want)
	}
	return nil
}

func suiteCounted(c Comm) error {
	l, clk := NewLedger(), clock.New()
	k := NewCounted(c, "sequence", l, clk, nil)
	n, r := int64(c.Size()), int64(c.Rank())
	recv, send := exchangeRows(c, 1)
	src, dst := newTensor(tensor.BF16, total(send), 5), newTensor(tensor.BF16, total(recv), 5)
	if err := k.AllToAll(nil, dst, src, recv, send); err != nil {
		return err
	}
	request, err := k.AllToAllStart(nil, dst, src, recv, send)
	if err != nil {
		return err
	}
	if err := request.Wait(); err != nil {
		return err
	}
	rows := make([]int64, n)
	for j := range rows {
		rows[j] = int64(j) + 1
	}
	whole, part := newTensor(tensor.F32, total(rows), 2), newTensor(tensor.F32, r+1, 2)
	to := int((r + 1) % n)
	err = errors.Join(k.AllReduce(nil, newTensor(tensor.F32, 10), Sum), k.AllGather(nil, whole, part, rows), k.ReduceScatter(nil, part, whole, rows),
		k.Broadcast(nil, newTensor(tensor.I32, 9), 0), k.SendRecv(nil, newTensor(tensor.U8, 3), int((r-1+n)%n), newTensor(tensor.U8, 3), to), k.Barrier())
	if err != nil {
		return err
	}
	var exchanged int64
	for j := range int(n) {
		if j != int(r) {
			exchanged += rowsBetween(int(r), j) * 5 * 2
		}
	}
	lo, hi := Shard(10, int(r), int(n))
	sent := map[string]int64{OpAllToAll: 2 * exchanged, OpAllReduce: 4 * (10 - (hi - lo) + (n-1)*(hi-lo)), OpAllGather: (n - 1) * (r + 1) * 8,
		OpReduceScatter: (n*(n+1)/2 - r - 1) * 8, OpBroadcast: 36, OpSendRecv: 3, OpBarrier: 0}
	if r == n-1 {
		sent[OpBroadcast] = 0
	}
	if n == 1 {
		sent[OpSendRecv] = 0
	}
	for op, want := range sent {
		e, calls := l.Get("sequence", op), int64(1)
		if op == OpAllToAll {
			calls = 2
		}
		if e.Bytes != want || e.Calls != calls || e.Seconds <= 0 {
			return wrong("%s: %+v, want %d calls and %d bytes", op, e, calls, want)
		}
	}
	// Over all ranks the all-reduce of n elements sends 2(P-1)·n, the all-to-all all but the diagonal.
	bytes := []int64{l.Get("sequence", OpAllReduce).Bytes}
	if err := c.AllReduce(nil, int64s(bytes), Sum); err != nil {
		return err
	}
	if bytes[0] != 2*(n-1)*40 {
		return wrong("all-reduce sent %d bytes in all, want %d", bytes[0], 2*(n-1)*40)
	}
	calls := map[string]int64{}
	for _, p := range clk.Phases() {
		calls[p.Name] = p.Calls
	}
	if calls["exchange"] != 4 || calls["reduce"] != 5 || len(calls) != 2 {
		return wrong("clock: %v", clk.Phases())
	}
	return nil
}

func suiteMesh(c Comm) error {
	n := c.Size()
	for _, ulysses := range []int{0, 1, 2, n, n + 1, -1} {
		m, err := NewMesh(c, ulysses, 1, NewLedger(), nil, nil)
		p := ulysses
		if p == 0 {
			p = n
		}
		if p < 0 || n%p != 0 {
			if status.Of(err) != status.InvalidConfig {
				return wrong("mesh %d of %d ranks: %v", ulysses, n, err)
			}
			continue
		}
		if err != nil {
			return err
		}
		if m.Seq.Size() != p || m.Seq.Rank() != c.Rank()%p || m.Data.Size() != n/p || m.Data.Rank() != c.Rank()/p ||
			m.Replica != c.Rank()/p || m.Replicas != n/p || m.Ulysses != p || m.World.Size() != n {
			return wrong("mesh %d of %d ranks: %+v", ulysses, n, m)
		}
		x := []int32{int32(c.Rank())}
		if err := m.Data.AllReduce(nil, tensor.OfInt32(x, 1), Sum); err != nil {
			return err
		}
		if want := int32(m.Replicas*m.Seq.Rank() + p*m.Replicas*(m.Replicas-1)/2); x[0] != want {
			return wrong("sum of ranks over data: %d, want %d", x[0], want)
		}
		if err := errors.Join(m.Seq.Close(), m.Data.Close()); err != nil {
			return err
		}
	}
	if _, err := NewMesh(c, 0, 2, nil, nil, nil); status.Of(err) != status.Unsupported {
		return wrong("ring 2: %v", err)
	}
	return nil
}
