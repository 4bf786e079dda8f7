//! Updates of packed tensors under load: all stages together, compared with tensors packed on the host.

use unweight_format::{Histogram, Matrix, raw::packed, testing::Random};
use unweight_rt::{
    DeviceBuffer,
    raw::{
        ops::update::{SparseUpdate, Updated, Updater},
        weight::DevicePacked,
    },
};

use super::{Run, StressRow};
use crate::{data::normal_bf16, error::BenchError};

/// One element in this many is replaced.
const EVERY: u64 = 50;

impl Run<'_> {
    /// Replaces elements and puts the former ones back, again and again. New elements include zeros, infinities and
    /// values next to the window.
    pub(super) fn updates(&self) -> Result<Vec<StressRow>, BenchError> {
        let variant = format!("{}, all stages", self.family("update"));
        if !self.options.selects(&variant) {
            return Ok(Vec::new());
        }
        let (updater, mut rows) = (Updater::new(self.stream, self.kernels)?, Vec::new());
        for (n, k) in [(64u32, 64u32), (192, 576), (1024, 4096)] {
            let mut random = Random::new(n.into());
            let elements = n as usize * k as usize;
            let before = normal_bf16(elements, 0.02, 79);
            let places: Vec<u64> = (0..elements as u64).filter(|_| random.below(EVERY) == 0).collect();
            let [mut after, values] = [before.clone(), normal_bf16(places.len(), 0.02, 80)];
            for (i, (&place, value)) in places.iter().zip(values.chunks_exact(2)).enumerate() {
                let odd = [[0u8, 0], [0x80, 0x7f], [0, 0x80], [1, 0]];
                let value = if i % 97 == 5 { &odd[i / 97 % 4] } else { value };
                after[place as usize * 2..][..2].copy_from_slice(value);
            }
            let words_at = |bytes: &[u8]| -> Vec<u16> {
                places
                    .iter()
                    .map(|&at| u16::from_le_bytes([bytes[at as usize * 2], bytes[at as usize * 2 + 1]]))
                    .collect()
            };
            let packed = |bytes: &[u8]| {
                let matrix = Matrix::new(bytes, n as usize, k as usize)?;
                packed::pack(matrix, &Histogram::of(bytes)).map_err(|why| BenchError::Unpackable { n, k, why })
            };
            let hosts = [packed(&after)?, packed(&before)?];
            let index = DeviceBuffer::from_host(self.stream, &places)?;
            let values = [&after, &before].map(|bytes| DeviceBuffer::from_host(self.stream, &words_at(bytes)));
            let [after, before] = values;
            let values = [after?, before?];
            // Memory for the longer of both lists.
            let words = hosts.each_ref().map(|host| host.escapes().len() / 4);
            let mut lists: Vec<u32> = words_of(hosts[1].escapes());
            lists.resize(words[0].max(words[1]), 0);
            let tensor = DevicePacked::new(
                hosts[1].grid(),
                hosts[1].window(),
                DeviceBuffer::from_host(self.stream, hosts[1].packed())?,
                DeviceBuffer::from_host(self.stream, &words_of(hosts[1].escape_heads()))?,
                DeviceBuffer::from_host(self.stream, &lists)?,
            )?;
            let mut scratch = DeviceBuffer::zeroed(self.stream, Updater::scratch_words([&tensor].into_iter()))?;
            let mut differing = 0;
            for launch in 0..self.options.launches.max(2) as usize {
                let (host, words) = (&hosts[launch % 2], words[launch % 2]);
                let (index, values) = (index.address(), values[launch % 2].address());
                let job = SparseUpdate { tensor: &tensor, index, values, updates: places.len() as u32 };
                // SAFETY: index and values have so many elements, and all memory is used by this stream only.
                let updated = unsafe { updater.update(&[job], &mut scratch) }?;
                let is_same = updated == [Updated::InPlace { escape_words: words }]
                    && tensor.packed().to_host(self.stream)? == host.packed()
                    && tensor.escape_heads().to_host(self.stream)? == words_of(host.escape_heads())
                    && tensor.escapes().read(self.stream, 0, words)? == words_of(host.escapes());
                differing += u32::from(!is_same);
            }
            let (variant, launches) = (variant.clone(), self.options.launches.max(2));
            rows.push(StressRow { variant, m: 0, n, k, launches, differing, wrong: None });
        }
        Ok(rows)
    }
}

fn words_of(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().expect("4 bytes"))).collect()
}
