//! Cosines and sines of the rotary embeddings of a model, on the device.

use unweight_model::{ModelConfig, Rope, RopePairs};
use unweight_rt::{
    DeviceError, DeviceMatrix, LaunchError, Stream,
    raw::ops::{attention::RotaryTable, rope::RopeTable},
};

/// The cosines and sines of each layer.
#[derive(Debug)]
pub(super) struct LayerAngles {
    default: Angles,
    /// The angles of layers with a window, if they differ, and which layers these are.
    local: Option<(Angles, Vec<bool>)>,
}

impl LayerAngles {
    /// Computes and uploads the angles of `positions` positions.
    pub(super) fn new(stream: &Stream, config: &ModelConfig, positions: u32) -> Result<Self, DeviceError> {
        let has_window = || config.window.iter().map(Option::is_some).collect();
        let local = config.local_rope.as_ref();
        let local = local.map(|rope| Ok::<_, DeviceError>((Angles::new(stream, rope, positions)?, has_window())));
        Ok(Self { default: Angles::new(stream, &config.rope, positions)?, local: local.transpose()? })
    }

    /// The angles of a layer.
    pub(super) fn of(&self, layer: usize) -> &Angles {
        match &self.local {
            Some((angles, layers)) if layers.get(layer).is_some_and(|is_local| *is_local) => angles,
            _ => &self.default,
        }
    }
}

/// Cosines and sines of every position of a context, bf16 `[positions, rope_dim / 2]` each.
#[derive(Debug)]
pub(super) struct Angles {
    cosines: DeviceMatrix,
    sines: DeviceMatrix,
    rope_dim: u32,
}

impl Angles {
    fn new(stream: &Stream, rope: &Rope, positions: u32) -> Result<Self, DeviceError> {
        let (table, angles) = (rope.table(positions), rope.dim / 2);
        let upload = |values: &[half::bf16]| {
            let mut bits: Vec<u16> = values.iter().map(|value| value.to_bits()).collect();
            if rope.pairs == RopePairs::Adjacent {
                bits = interleaved(&bits, angles as usize);
            }
            DeviceMatrix::from_host(stream, positions, angles, &bits)
        };
        Ok(Self { cosines: upload(&table.cos)?, sines: upload(&table.sin)?, rope_dim: rope.dim })
    }

    /// The table for attention of steps.
    pub(super) fn rotary(&self) -> RotaryTable<'_> {
        RotaryTable { cosines: self.cosines.view(), sines: self.sines.view() }
    }

    /// The table for a prompt chunk.
    pub(super) fn table(&self) -> Result<RopeTable<'_>, LaunchError> {
        RopeTable::new(self.cosines.data(), self.sines.data(), self.rope_dim)
    }
}

/// Interleaves the lower and the upper half of each row of `angles` angles, as kernels with `adjacent` read them.
fn interleaved(values: &[u16], angles: usize) -> Vec<u16> {
    let interleave = |row: &[u16]| {
        let (low, high) = row.split_at(angles / 2);
        low.iter().zip(high).flat_map(|(low, high)| [*low, *high]).collect::<Vec<_>>()
    };
    values.chunks_exact(angles.max(1)).flat_map(interleave).collect()
}
