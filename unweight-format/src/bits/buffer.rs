//! Large buffers on huge pages, which avoid a page fault every 4 KiB.

/// Bytes from which a buffer requests huge pages.
const HUGE_FROM: usize = 4 << 20;

/// Returns `len` zero bytes. Large buffers request huge pages before their first access: faulting in fresh 4 KiB pages
/// costs more than encoding does (measured: 46 of 90 ms for 117 MB on a virtual machine).
pub fn zeroed(len: usize) -> Vec<u8> {
    let mut bytes = vec![0u8; len];
    advise(&mut bytes);
    bytes
}

/// Returns an empty vector with a capacity for `len` bytes, on huge pages like [`zeroed`].
pub(crate) fn with_capacity(len: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(len);
    advise(bytes.spare_capacity_mut());
    bytes
}

/// Like [`zeroed`], but returns `None` if the allocation fails.
pub(crate) fn try_zeroed(len: usize) -> Option<Vec<u8>> {
    let layout = std::alloc::Layout::array::<u8>(len).ok()?;
    if len == 0 {
        return Some(Vec::new());
    }
    // SAFETY: the layout is not empty.
    let start = unsafe { std::alloc::alloc_zeroed(layout) };
    if start.is_null() {
        return None;
    }
    // SAFETY: `len` initialised bytes of the global allocator, with the layout that a vector of this capacity has.
    let mut bytes = unsafe { Vec::from_raw_parts(start, len, len) };
    advise(&mut bytes);
    Some(bytes)
}

/// Physical memory of this machine in bytes, the limit of a single buffer. (A larger allocation may succeed, and kill
/// the process when it is accessed.)
pub(crate) fn memory_bytes() -> u64 {
    #[cfg(target_os = "linux")]
    {
        let info = rustix::system::sysinfo();
        u64::from(info.mem_unit).saturating_mul(info.totalram as u64)
    }
    #[cfg(not(target_os = "linux"))]
    {
        u64::MAX
    }
}

#[cfg(target_os = "linux")]
fn advise<T>(memory: &mut [T]) {
    const PAGE: usize = 4096;
    let range = memory.as_mut_ptr_range();
    let (start, end) = (range.start.addr().next_multiple_of(PAGE), range.end.addr() / PAGE * PAGE);
    if end.saturating_sub(start) >= HUGE_FROM {
        let first = range.start.wrapping_add(start - range.start.addr());
        // SAFETY: whole pages inside an allocation that is exclusively ours; huge pages do not change its contents.
        let advice = unsafe { rustix::mm::madvise(first.cast(), end - start, rustix::mm::Advice::LinuxHugepage) };
        // Without huge pages the buffer is slower, not wrong.
        _ = advice;
    }
}

#[cfg(not(target_os = "linux"))]
fn advise<T>(_: &mut [T]) {}

/// Makes glibc's allocator keep up to 256 MiB of freed memory instead of returning it to the kernel and getting it back
/// zeroed: for a program that codes one tensor after another. Call it before other threads start. It affects the whole
/// process, so a library must not call it. With another allocator it does nothing.
pub fn keep_freed_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        // Above 32 MiB glibc always maps, and `zeroed` requests huge pages.
        // SAFETY: mallopt changes two thresholds of the allocator; values that it does not accept change nothing.
        unsafe {
            libc::mallopt(libc::M_MMAP_THRESHOLD, 32 << 20);
            libc::mallopt(libc::M_TRIM_THRESHOLD, 256 << 20);
        }
    }
}

/// Returns glibc's free memory to the kernel, and makes the allocator do so from now on: for a program that keeps
/// running after a peak of memory use. Blocks of 1 MiB and more are always returned. It affects the whole process, so a
/// library must not call it. With another allocator it does nothing.
pub fn return_freed_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        // SAFETY: mallopt changes two thresholds of the allocator, and malloc_trim returns free pages to the kernel;
        // both take the allocator's own locks.
        unsafe {
            libc::mallopt(libc::M_MMAP_THRESHOLD, 1 << 20);
            libc::mallopt(libc::M_TRIM_THRESHOLD, 4 << 20);
            libc::malloc_trim(0);
        }
    }
}
