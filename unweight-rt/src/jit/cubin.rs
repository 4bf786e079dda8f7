//! Reads a kernel's resources and instructions from a cubin.
//!
//! A cubin is a 64-bit little-endian ELF file of machine 190. This module reads these sections:
//!
//! ```text
//! .nv.info              per kernel (payload: symbol u32, value u32): 0x2f registers, 0x11 frame bytes,
//!                       0x12 minimum stack bytes
//! .nv.info.<kernel>     0x05 maximum threads (3 x u32), 0x10 required threads (3 x u32),
//!                       0x17 a parameter (its size: bits 18 and up of the third word)
//! .nv.shared.<kernel>   its size: static shared memory and 1024 bytes reserved by the system
//! .text.<kernel>        16 bytes per instruction (sm_70 and newer); opcode = low 9 bits
//! ```
//!
//! An attribute is `format u8, id u8`, followed by nothing (format 1), one byte (2), two bytes (3), or a size u16 and
//! that many bytes (4). NVIDIA documents neither ids nor opcodes; they were found by compiling kernels that contain a
//! known instruction (tests/jit/nvrtc.rs repeats that). Every offset is checked: malformed bytes are an error, never a
//! panic.

use std::collections::BTreeMap;

use object::{
    LittleEndian,
    elf::{FileHeader64, SHT_NOBITS},
    read::elf::{FileHeader, SectionHeader, Sym},
};
use serde::{Deserialize, Serialize};

/// The part of a section `.nv.shared.<kernel>` that the system reserves on sm_80 and newer. It precedes the kernel's
/// own shared memory and does not count towards a kernel's limit.
const RESERVED_SMEM_BYTES: u64 = 1024;

/// `e_machine` of CUDA in an ELF header.
const EM_CUDA: u16 = 190;

/// An instruction, identified by its low 9 bits on `sm_90`. Bits 9 to 11 encode the form of the operands (register,
/// descriptor, constant, ...) and are excluded, so that both forms of wgmma are one opcode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Opcode(
    /// The opcode in the instruction word.
    pub u16,
);

impl Opcode {
    /// wgmma, with the A operand in shared memory (0x9f0) or in registers (0xdf0).
    pub const HGMMA: Opcode = Opcode(0x1f0);
    /// mma.sync of 16-bit floats.
    pub const HMMA: Opcode = Opcode(0x03c);
    /// Load from local memory: a spill, or an array indexed at run time.
    pub const LDL: Opcode = Opcode(0x183);
    /// Store to local memory.
    pub const STL: Opcode = Opcode(0x187);
    /// The opcode of `ldmatrix`.
    pub const LDSM: Opcode = Opcode(0x03b);
    /// The opcode of `stmatrix`.
    pub const STSM: Opcode = Opcode(0x044);
    /// The opcode of `cp.async`.
    pub const LDGSTS: Opcode = Opcode(0x1ae);
    /// `cp.async.bulk` without a tensor map, in either direction.
    pub const UBLKCP: Opcode = Opcode(0x1ba);
    /// TMA load of a tensor box.
    pub const UTMALDG: Opcode = Opcode(0x1b4);
    /// TMA store of a tensor box.
    pub const UTMASTG: Opcode = Opcode(0x1b5);
    /// The opcode of `setmaxnreg`.
    pub const USETMAXREG: Opcode = Opcode(0x1c8);

    /// Returns the opcode of an instruction's first two bytes.
    pub const fn of(low: u16) -> Self {
        Opcode(low & 0x1ff)
    }
}

/// Registers, memory and instructions of a kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelResources {
    /// Registers per thread.
    pub registers: u32,
    /// Bytes of the local frame per thread.
    pub frame_bytes: u32,
    /// Bytes of stack per thread; above 0 after spills.
    pub stack_bytes: u32,
    /// Threads per block set by `__launch_bounds__`, or 0.
    pub max_threads: u32,
    /// Bytes of static shared memory, without the 1024 bytes that the system reserves.
    pub static_smem_bytes: u64,
    /// Bytes of parameters, without padding.
    pub param_bytes: u32,
    /// The number of instructions.
    pub instructions: u64,
    /// The number of loads and stores of local memory among them.
    pub local_accesses: u64,
}

/// A kernel of a cubin: its name, resources and instructions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KernelInfo {
    /// The symbol of the kernel.
    pub name: String,
    /// The resources of the kernel.
    pub resources: KernelResources,
    /// The number of instructions per opcode.
    pub opcodes: BTreeMap<Opcode, u64>,
}

impl KernelInfo {
    /// Returns the number of instructions with any of these opcodes.
    pub fn count(&self, opcodes: &[Opcode]) -> u64 {
        opcodes.iter().filter_map(|opcode| self.opcodes.get(opcode)).sum()
    }

    /// Returns whether registers were spilled to memory.
    pub fn spills(&self) -> bool {
        self.resources.local_accesses > 0 || self.resources.stack_bytes > 0
    }
}

/// The kernels of a cubin, in the order of their sections.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CubinInfo {
    /// The kernels; at least one.
    pub kernels: Vec<KernelInfo>,
}

impl CubinInfo {
    /// Returns the kernel with this name.
    pub fn kernel(&self, name: &str) -> Result<&KernelInfo, CubinError> {
        self.kernels.iter().find(|kernel| kernel.name == name).ok_or_else(|| CubinError::NoSuchKernel {
            name: name.to_owned(),
            present: self.kernels.iter().map(|kernel| kernel.name.clone()).collect(),
        })
    }
}

/// A file that is not a cubin, or a damaged cubin.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CubinError {
    /// The file is not an ELF file, or its tables point outside the file.
    #[error("not a readable cubin: {0}; delete it and compile again")]
    Elf(String),
    /// The ELF file is for another machine.
    #[error("ELF machine {found}, expected {EM_CUDA} (CUDA); delete it and compile again")]
    ElfMachine {
        /// The header's machine number.
        found: u16,
    },
    /// The content of a section contradicts itself.
    #[error("cubin section {section} is damaged at byte {offset}: {what}; delete it and compile again")]
    Section {
        /// The section.
        section: String,
        /// The offset in the section.
        offset: usize,
        /// The defect.
        what: &'static str,
    },
    /// The cubin has no kernel.
    #[error("the cubin contains no kernel")]
    Empty,
    /// The cubin does not contain the requested kernel.
    #[error("the cubin contains no kernel {name}, only {}", .present.join(", "))]
    NoSuchKernel {
        /// The requested kernel.
        name: String,
        /// The kernels in the cubin.
        present: Vec<String>,
    },
}

impl CubinError {
    /// Returns the stable code of this error; docs/reference/errors.md lists all.
    pub fn code(&self) -> &'static str {
        "cubin-invalid"
    }
}

impl From<object::read::Error> for CubinError {
    fn from(error: object::read::Error) -> Self {
        CubinError::Elf(error.to_string())
    }
}

/// A part of a cubin that the GPU executes or reads as data.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ProgramPart {
    /// The section's name without the kernel's name (`.text`, `.nv.constant0`, ...), or `object` for a table in memory.
    pub name: String,
    /// Content of the section; empty if the section occupies no bytes in the file.
    pub bytes: Vec<u8>,
}

/// The maximum size of objects that the compiler folds into code. It keeps a copy of each in memory that no instruction
/// reads.
const FOLDED_BYTES: u64 = 8;

/// Returns code, constant banks, static shared memory and tables of a cubin, sorted. Two cubins with equal parts
/// compute the same, regardless of symbol names and source lines. Constants of up to 8 bytes are part of the code.
pub fn program(bytes: &[u8]) -> Result<Vec<ProgramPart>, CubinError> {
    let aligned = Aligned::of(bytes);
    let (header, endian) = header_of(&aligned)?;
    let sections = header.sections(endian, &*aligned)?;
    let names = sections.iter().map(|section| Ok(text(sections.section_name(endian, section)?)));
    let names = names.collect::<Result<Vec<_>, CubinError>>()?;
    let kernels: Vec<&str> = names.iter().filter_map(|name| name.strip_prefix(".text.")).collect();
    if kernels.is_empty() {
        return Err(CubinError::Empty);
    }
    let mut parts = Vec::new();
    for (section, name) in sections.iter().zip(&names) {
        // Bank 4 contains the addresses of objects.
        let constants = name.starts_with(".nv.constant") && !name.starts_with(".nv.constant4");
        if constants || name.starts_with(".text.") || name.starts_with(".nv.shared.") {
            let owner = kernels.iter().find(|kernel| name.ends_with(**kernel));
            let name =
                owner.and_then(|kernel| name.strip_suffix(*kernel)).unwrap_or(name).trim_end_matches('.').to_owned();
            parts.push(ProgramPart { name, bytes: section.data(endian, &*aligned)?.to_vec() });
        }
    }
    for symbol in sections.symbols(endian, &*aligned, object::elf::SHT_SYMTAB)?.iter() {
        let (size, index) = (symbol.st_size(endian), usize::from(symbol.st_shndx(endian).0));
        let Some(name) = names.get(index).filter(|name| name.starts_with(".nv.global")) else { continue };
        if size > FOLDED_BYTES {
            let section = sections.section(object::SectionIndex(index))?.data(endian, &*aligned)?;
            let value = symbol.st_value(endian);
            // An uninitialised object occupies no bytes in the file.
            let range = usize::try_from(value).ok().zip(usize::try_from(value.saturating_add(size)).ok());
            let bytes = range.and_then(|(from, to)| section.get(from..to)).unwrap_or_default().to_vec();
            parts.push(ProgramPart { name: format!("object of {name}"), bytes });
        }
    }
    parts.sort();
    Ok(parts)
}

fn header_of(bytes: &[u8]) -> Result<(&FileHeader64<LittleEndian>, LittleEndian), CubinError> {
    let header = FileHeader64::<LittleEndian>::parse(bytes)?;
    let endian = header.endian()?;
    match header.e_machine(endian).0 {
        EM_CUDA => Ok((header, endian)),
        found => Err(CubinError::ElfMachine { found }),
    }
}

/// Reads the kernels of a cubin.
pub fn read(bytes: &[u8]) -> Result<CubinInfo, CubinError> {
    let aligned = Aligned::of(bytes);
    let bytes = &*aligned;
    let (header, endian) = header_of(bytes)?;
    let sections = header.sections(endian, bytes)?;
    let symbols = sections.symbols(endian, bytes, object::elf::SHT_SYMTAB)?;

    let mut kernels: Vec<KernelInfo> = Vec::new();
    let mut by_name: BTreeMap<String, usize> = BTreeMap::new();
    for section in sections.iter() {
        let name = text(sections.section_name(endian, section)?);
        if let Some(kernel) = name.strip_prefix(".text.") {
            let code = section.data(endian, bytes)?;
            let mut info = KernelInfo { name: kernel.to_owned(), ..KernelInfo::default() };
            read_code(&mut info, code, &name)?;
            if by_name.insert(kernel.to_owned(), kernels.len()).is_none() {
                kernels.push(info);
            }
        }
    }
    for section in sections.iter() {
        let name = text(sections.section_name(endian, section)?);
        if name == ".nv.info" {
            for attribute in attributes(section.data(endian, bytes)?, &name) {
                let attribute = attribute?;
                let (Some(symbol), Some(value)) = (word(attribute.payload, 0), word(attribute.payload, 1)) else {
                    continue;
                };
                let symbol = symbols.symbol(object::SymbolIndex(symbol as usize))?;
                let kernel = text(symbol.name(endian, symbols.strings())?);
                // Device functions that are not inlined have their own attributes; skip them.
                let Some(index) = by_name.get(&kernel) else { continue };
                let resources = &mut kernels[*index].resources;
                match attribute.id {
                    0x2f => resources.registers = value,
                    0x11 => resources.frame_bytes = value,
                    0x12 => resources.stack_bytes = value,
                    _ => {}
                }
            }
        } else if let Some(index) = name.strip_prefix(".nv.info.").and_then(|kernel| by_name.get(kernel)) {
            let resources = &mut kernels[*index].resources;
            for attribute in attributes(section.data(endian, bytes)?, &name) {
                let attribute = attribute?;
                match attribute.id {
                    0x05 | 0x10 => {
                        let threads = (0..3)
                            .map(|dimension| word(attribute.payload, dimension))
                            .try_fold(1u32, |product, side| product.checked_mul(side?));
                        resources.max_threads = threads.ok_or(CubinError::Section {
                            section: name.clone(),
                            offset: attribute.offset,
                            what: "thread counts are not three words with a product below 2^32",
                        })?;
                    }
                    0x17 => {
                        let size = word(attribute.payload, 2).map_or(0, |word| word >> 18);
                        resources.param_bytes = resources.param_bytes.saturating_add(size);
                    }
                    _ => {}
                }
            }
        } else if let Some(index) = name.strip_prefix(".nv.shared.").and_then(|kernel| by_name.get(kernel)) {
            // The section has no bytes in the file, only a size.
            if section.sh_type(endian) == SHT_NOBITS {
                kernels[*index].resources.static_smem_bytes =
                    section.sh_size(endian).saturating_sub(RESERVED_SMEM_BYTES);
            }
        }
    }
    if kernels.is_empty() {
        return Err(CubinError::Empty);
    }
    Ok(CubinInfo { kernels })
}

fn read_code(info: &mut KernelInfo, code: &[u8], section: &str) -> Result<(), CubinError> {
    let (instructions, rest) = code.as_chunks::<16>();
    if !rest.is_empty() {
        return Err(CubinError::Section {
            section: section.to_owned(),
            offset: code.len() - rest.len(),
            what: "code is not a multiple of 16 bytes",
        });
    }
    for instruction in instructions {
        let low = u16::from_le_bytes([instruction[0], instruction[1]]);
        *info.opcodes.entry(Opcode::of(low)).or_default() += 1;
    }
    info.resources.instructions = instructions.len() as u64;
    info.resources.local_accesses = info.count(&[Opcode::LDL, Opcode::STL]);
    Ok(())
}

struct Attribute<'a> {
    id: u8,
    /// The payload of format 4.
    payload: &'a [u8],
    offset: usize,
}

fn attributes<'a>(bytes: &'a [u8], section: &'a str) -> impl Iterator<Item = Result<Attribute<'a>, CubinError>> {
    let mut offset = 0;
    std::iter::from_fn(move || {
        if offset == bytes.len() {
            return None;
        }
        let start = offset;
        let damaged = |what| Some(Err(CubinError::Section { section: section.to_owned(), offset: start, what }));
        let Some(head) = bytes.get(start..start + 4) else {
            offset = bytes.len();
            return damaged("an attribute is cut off");
        };
        let half = u16::from_le_bytes([head[2], head[3]]);
        let size = match head[0] {
            1..=3 => 0,
            4 => usize::from(half),
            _ => {
                offset = bytes.len();
                return damaged("an attribute has an unknown format");
            }
        };
        let Some(payload) = bytes.get(start + 4..start + 4 + size) else {
            offset = bytes.len();
            return damaged("an attribute's payload is cut off");
        };
        offset = start + 4 + size;
        Some(Ok(Attribute { id: head[1], payload, offset: start }))
    })
}

fn word(payload: &[u8], index: usize) -> Option<u32> {
    let bytes = payload.get(4 * index..4 * index + 4)?;
    Some(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Bytes at an address that is a multiple of 8: ELF structures are read in place, and a caller's slice may have any
/// alignment.
enum Aligned<'a> {
    Borrowed(&'a [u8]),
    Copied { words: Vec<u64>, len: usize },
}

impl<'a> Aligned<'a> {
    fn of(bytes: &'a [u8]) -> Aligned<'a> {
        if (bytes.as_ptr() as usize).is_multiple_of(8) {
            return Aligned::Borrowed(bytes);
        }
        let words = bytes
            .chunks(8)
            .map(|chunk| {
                let mut word = [0; 8];
                word[..chunk.len()].copy_from_slice(chunk);
                u64::from_ne_bytes(word)
            })
            .collect();
        Aligned::Copied { words, len: bytes.len() }
    }
}

impl std::ops::Deref for Aligned<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Aligned::Borrowed(bytes) => bytes,
            Aligned::Copied { words, len } => &object::pod::bytes_of_slice(words)[..*len],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A cubin that NVRTC 13.0 compiled for sm_90a from
    /// `extern "C" __global__ void __launch_bounds__(96) k(float* x) { __shared__ float s[64]; s[threadIdx.x & 63] =
    /// x[threadIdx.x]; __syncthreads(); x[threadIdx.x] = s[63 - (threadIdx.x & 63)]; }`
    const CUBIN: &[u8] = include_bytes!("../../testdata/shared.cubin");

    #[test]
    fn a_real_cubin() {
        let info = read(CUBIN).unwrap();
        assert_eq!(info.kernels.len(), 1);
        let kernel = info.kernel("k").unwrap();
        let resources = &kernel.resources;
        assert!((8..=32).contains(&resources.registers), "{resources:?}");
        assert_eq!(resources.max_threads, 96);
        assert_eq!(resources.static_smem_bytes, 256);
        assert_eq!(resources.param_bytes, 8);
        assert_eq!((resources.stack_bytes, resources.local_accesses), (0, 0));
        assert_eq!(resources.instructions, kernel.opcodes.values().sum::<u64>());
        assert!(!kernel.spills());
        let error = info.kernel("other").unwrap_err();
        assert_eq!(error.to_string(), "the cubin contains no kernel other, only k");
    }

    #[test]
    fn a_program_is_code_and_data_without_names() {
        let parts = program(CUBIN).unwrap();
        let names: Vec<_> = parts.iter().map(|part| part.name.as_str()).collect();
        assert_eq!(names, [".nv.constant0", ".nv.shared", ".nv.shared.reserved.0", ".text"]);
        assert_eq!(parts[3].bytes.len() as u64, 16 * read(CUBIN).unwrap().kernels[0].resources.instructions);
        assert!(matches!(program(b"text"), Err(CubinError::Elf(_))));
    }

    #[test]
    fn any_alignment() {
        let mut shifted = vec![0u8; CUBIN.len() + 8];
        for shift in 0..8 {
            shifted[shift..shift + CUBIN.len()].copy_from_slice(CUBIN);
            assert_eq!(read(&shifted[shift..shift + CUBIN.len()]), read(CUBIN));
        }
    }

    #[test]
    fn every_truncation_of_what_is_read_is_an_error() {
        // Section table: its offset is at byte 40 of the header, entries have 64 bytes, their number is at byte 60.
        // Program headers, which are not read here, may follow.
        let offset = u64::from_le_bytes(CUBIN[40..48].try_into().unwrap()) as usize;
        let sections = usize::from(u16::from_le_bytes(CUBIN[60..62].try_into().unwrap()));
        let end = offset + 64 * sections;
        assert!(end > 3000 && end <= CUBIN.len());
        for len in 0..end {
            assert!(read(&CUBIN[..len]).is_err(), "{len} bytes were accepted");
        }
    }

    #[test]
    fn no_damaged_byte_causes_a_panic() {
        let mut refused = 0;
        for index in 0..CUBIN.len() {
            for flip in [0x01, 0x80, 0xff] {
                let mut bytes = CUBIN.to_vec();
                bytes[index] ^= flip;
                refused += usize::from(read(&bytes).is_err());
            }
        }
        assert!(refused > 100, "only {refused} refused");
    }

    #[test]
    fn other_elf_files_are_rejected() {
        assert!(matches!(read(b"text"), Err(CubinError::Elf(_))));
        let mut other = CUBIN.to_vec();
        other[18] = 62; // x86-64
        assert_eq!(read(&other), Err(CubinError::ElfMachine { found: 62 }));
    }
}
