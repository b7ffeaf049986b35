! Attention over a sequence that is sharded over the ranks of your own MPI program, in Fortran 2008
! with iso_c_binding. The program compares the output with the output of one rank alone: they are
! bitwise equal.
!   mpif90 attention.f90 -lulysses && mpirun -n 4 ./a.out
!   mpirun -n 4 ./a.out 3            on a communicator of the first three ranks
! Arrays are (dim, heads, rows, batch): the first axis is dense in Fortran, the last one in C.
program attention
  use, intrinsic :: iso_c_binding
  use mpi
  implicit none

  type, bind(c) :: tensor
    type(c_ptr) :: data = c_null_ptr
    integer(c_int32_t) :: device = 1, ordinal = 0, ndim = 4
    integer(c_int8_t) :: code = 2, bits = 32
    integer(c_int16_t) :: lanes = 1
    type(c_ptr) :: shape = c_null_ptr, strides = c_null_ptr
    integer(c_int64_t) :: byte_offset = 0
  end type
  type, bind(c) :: attention_desc
    integer(c_int32_t) :: struct_size = 88, dtype = int(z'2002'), flags = 1, block_q = 0, block_k = 0
    real(c_float) :: scale = 0, softcap = 0, dropout = 0
    integer(c_int64_t) :: heads = 0, kv_heads = 0, head_dim = 0, v_dim = 0, window_left = 0, window_right = 0, max_tokens = 0
  end type
  type, bind(c) :: batch_desc
    integer(c_int32_t) :: struct_size = 80, flags = 0
    integer(c_int64_t) :: batch = 1, seq = 0, rows = 0, kv_seq = 0, kv_rows = 0, docs = 0
    type(c_ptr) :: cu_seqlens = c_null_ptr, kv_cu_seqlens = c_null_ptr, positions = c_null_ptr
  end type
  type, bind(c) :: batch_info
    integer(c_int32_t) :: struct_size = 104, ranges = 0
    integer(c_int64_t) :: seq = 0, rows = 0, lo(2) = 0, hi(2) = 0, max_rows = 0, gathered_rows = 0, kv_seq = 0, kv_rows = 0, &
                          kv_gathered_rows = 0, docs = 0
  end type
  type, bind(c) :: attention_args
    integer(c_int32_t) :: struct_size = 120, reserved = 0
    type(c_ptr) :: q = c_null_ptr, k = c_null_ptr, v = c_null_ptr, sinks = c_null_ptr, alibi = c_null_ptr, &
                   block_mask = c_null_ptr, &
                   out = c_null_ptr, lse = c_null_ptr
    integer(c_int64_t) :: dropout_seed = 0
    type(c_ptr) :: saved = c_null_ptr
    integer(c_int64_t) :: saved_bytes = 0
    type(c_ptr) :: workspace = c_null_ptr
    integer(c_int64_t) :: workspace_bytes = 0
    type(c_ptr) :: stream = c_null_ptr
  end type

  interface
    integer(c_int32_t) function create_local(options, context) bind(c, name="ulysses_context_create_local")
      import; type(c_ptr), value :: options; type(c_ptr) :: context
    end function
    integer(c_int32_t) function create_mpi(comm, options, context) bind(c, name="ulysses_context_create_mpi")
      import; integer(c_int64_t), value :: comm; type(c_ptr), value :: options; type(c_ptr) :: context
    end function
    integer(c_int32_t) function make_plan(context, desc, plan) bind(c, name="ulysses_attention_plan")
      import; type(c_ptr), value :: context; type(attention_desc) :: desc; type(c_ptr) :: plan
    end function
    integer(c_int32_t) function make_batch(context, desc, batch) bind(c, name="ulysses_batch_create")
      import; type(c_ptr), value :: context; type(batch_desc) :: desc; type(c_ptr) :: batch
    end function
    integer(c_int32_t) function query(batch, info) bind(c, name="ulysses_batch_query")
      import; type(c_ptr), value :: batch; type(batch_info) :: info
    end function
    integer(c_int32_t) function forward(plan, batch, args) bind(c, name="ulysses_attention_forward")
      import; type(c_ptr), value :: plan, batch; type(attention_args) :: args
    end function
    subroutine destroy(context) bind(c, name="ulysses_context_destroy")
      import; type(c_ptr), value :: context
    end subroutine
    function last_error() bind(c, name="ulysses_last_error")
      import; type(c_ptr) :: last_error
    end function
  end interface

  integer, parameter :: seq = 100, heads = 8, dim = 16
  integer :: rank, size, error, group, first
  character(len=8) :: word
  type(c_ptr) :: ranks, alone
  real(c_float), allocatable, target :: shard(:, :, :), whole(:, :, :)
  integer(c_int64_t) :: lo, zero
  logical :: same, all_same

  call MPI_Init(error)
  call MPI_Comm_rank(MPI_COMM_WORLD, rank, error)
  first = huge(first)
  if (command_argument_count() > 0) then
    call get_command_argument(1, word)
    read (word, *, iostat=error) first
    if (error /= 0) first = 0
  end if
  if (first < 1) then
    if (rank == 0) write (0, '(a)') 'usage: attention [N]    N: use the first N ranks, 1 or more'
    call MPI_Finalize(error)
    stop 1
  end if
  call MPI_Comm_split(MPI_COMM_WORLD, merge(0, MPI_UNDEFINED, rank < first), rank, group, error)  ! your communicator
  if (group == MPI_COMM_NULL) then
    call MPI_Finalize(error)
    stop
  end if
  call MPI_Comm_size(group, size, error)
  ! In Fortran, a communicator is the integer that MPI_Comm_c2f returns in C.
  call check(create_mpi(int(group, c_int64_t), c_null_ptr, ranks))
  call check(create_local(c_null_ptr, alone))
  call attend(ranks, shard, lo)
  call attend(alone, whole, zero)
  same = all(shard == whole(:, :, lo + 1 : lo + ubound(shard, 3)))
  call MPI_Allreduce(same, all_same, 1, MPI_LOGICAL, MPI_LAND, group, error)
  if (rank == 0) print '(i0, 3a)', size, ' ranks: out is ', trim(merge('equal to', 'NOT     ', all_same)), ' the output of one rank'
  call destroy(ranks)
  call destroy(alone)
  call MPI_Finalize(error)
  if (.not. all_same) stop 1

contains

  subroutine check(status)
    integer(c_int32_t), intent(in) :: status
    character(kind=c_char), pointer :: text(:)
    integer :: i
    if (status == 0) return
    call c_f_pointer(last_error(), text, [4096])
    do i = 1, 4096
      if (text(i) == c_null_char) exit
      write (0, '(a)', advance='no') text(i)
    end do
    write (0, *)
    call MPI_Abort(MPI_COMM_WORLD, int(status), error)
  end subroutine

  ! attend returns out of this rank's tokens. Its first token is lo, counted from 0.
  subroutine attend(context, out, lo)
    type(c_ptr), intent(in) :: context
    real(c_float), allocatable, target, intent(out) :: out(:, :, :)
    integer(c_int64_t), intent(out) :: lo
    real(c_float), allocatable, target :: x(:, :, :, :)
    integer(c_int64_t), target :: shape(4)
    type(tensor), target :: t(4)
    type(attention_desc) :: desc
    type(batch_desc) :: lengths
    type(batch_info) :: info
    type(attention_args) :: args
    type(c_ptr) :: plan, batch
    integer :: i, row, h, d

    desc%heads = heads
    desc%head_dim = dim
    lengths%seq = seq
    call check(make_plan(context, desc, plan))
    call check(make_batch(context, lengths, batch))
    call check(query(batch, info))
    lo = info%lo(1)
    shape = [1_c_int64_t, info%rows, int(heads, c_int64_t), int(dim, c_int64_t)]
    allocate (x(dim, heads, info%rows, 3), out(dim, heads, info%rows))
    do concurrent (i = 1:3, row = 1:int(info%rows), h = 1:heads, d = 1:dim)
      x(d, h, row, i) = real(mod(7*i + 3*d + 5*h + 11*(row + int(lo)), 101)) / 101 - 0.5
    end do
    do i = 1, 3
      t(i)%data = c_loc(x(1, 1, 1, i))
    end do
    t(4)%data = c_loc(out)
    do i = 1, 4
      t(i)%shape = c_loc(shape)
    end do
    args%q = c_loc(t(1))
    args%k = c_loc(t(2))
    args%v = c_loc(t(3))
    args%out = c_loc(t(4))
    call check(forward(plan, batch, args))  ! saved is null: no backward pass follows
  end subroutine
end program
