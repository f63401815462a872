"""Puts the networks of PP-OCRv4, which the package rapidocr-onnxruntime carries, into the repository beside this file.

pip install 'millrace[onnxruntime]' rapidocr-onnxruntime==1.4.4
python examples/ocr/put_models.py
millrace serve --model-repository examples/ocr/models
"""

import importlib.util
import shutil
from pathlib import Path

NETWORKS = {
    "detector": "ch_PP-OCRv4_det_infer.onnx",
    "classifier": "ch_ppocr_mobile_v2.0_cls_infer.onnx",
    "recogniser": "ch_PP-OCRv4_rec_infer.onnx",
}


def put(models: Path) -> None:
    """The networks, what characters the recogniser knows, and the ensemble's version, which has no file."""
    import onnxruntime

    spec = importlib.util.find_spec("rapidocr_onnxruntime")
    if spec is None or spec.origin is None:
        raise SystemExit("rapidocr-onnxruntime is not installed: pip install rapidocr-onnxruntime==1.4.4")
    for model, file in NETWORKS.items():
        (models / model / "1").mkdir(exist_ok=True)
        shutil.copyfile(Path(spec.origin).parent / "models" / file, models / model / "1" / "model.onnx")
    session = onnxruntime.InferenceSession(models / "recogniser" / "1" / "model.onnx")
    characters = session.get_modelmeta().custom_metadata_map["character"]
    (models / "read" / "1" / "characters.txt").write_text(characters.rstrip("\n") + "\n", encoding="utf-8")
    (models / "ocr" / "1").mkdir(exist_ok=True)


if __name__ == "__main__":
    put(Path(__file__).parent / "models")
