package cpu

import (
	"fmt"
	"sync/atomic"

	"ulysses/internal/status"
)

// pool runs a body on several goroutines at once. They are made once; a run allocates nothing. The
// caller is worker 0. The others are woken and join if they come before the work is over: a worker
// that the system wakes late is not waited for, so that a small run costs no more than the caller
// alone needs.
type pool struct {
	body   func(worker int)
	state  atomic.Int64 // workers that joined the open run; closed otherwise
	wake   []chan struct{}
	done   chan struct{}
	failed atomic.Pointer[failure]
}

// closed marks a state in which no worker may join.
const closed = -1

type failure struct{ text string }

func newPool(workers int) *pool {
	p := &pool{wake: make([]chan struct{}, workers-1), done: make(chan struct{}, workers)}
	p.state.Store(closed)
	for i := range p.wake {
		p.wake[i] = make(chan struct{}, 1)
		go p.serve(i+1, p.wake[i])
	}
	return p
}

func (p *pool) serve(worker int, wake <-chan struct{}) {
	for range wake {
		if p.join() {
			p.call(worker)
			p.done <- struct{}{}
		}
	}
}

// join enters the open run, if there is one.
func (p *pool) join() bool {
	for {
		n := p.state.Load()
		if n == closed {
			return false
		}
		if p.state.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

// call turns a panic of the body into a failure of the run.
func (p *pool) call(worker int) {
	defer func() {
		if r := recover(); r != nil {
			p.failed.CompareAndSwap(nil, &failure{fmt.Sprint(r)})
		}
	}()
	p.body(worker)
}

// run calls body(0) on the caller and body(1..helpers) on as many workers as wake in time. The body
// takes its tasks off a counter that all share, and returns when there are none left. A panic in a
// body is an Internal error.
func (p *pool) run(helpers int, body func(worker int)) error {
	p.body = body
	p.state.Store(0)
	for _, w := range p.wake[:min(helpers, len(p.wake))] {
		select {
		case w <- struct{}{}:
		default: // still has the wake of an earlier run, and will find this one
		}
	}
	p.call(0)
	for joined := p.state.Swap(closed); joined > 0; joined-- {
		<-p.done
	}
	if f := p.failed.Swap(nil); f != nil {
		return status.Errorf(status.Internal, "cpu: a task panicked: %s", f.text)
	}
	return nil
}

// close ends the workers. No run may be open.
func (p *pool) close() {
	for _, w := range p.wake {
		close(w)
	}
	p.wake = nil
}
